"""The operators' page (`carpool console`): what is in trouble, and what to do about it.

One thread reads Redis about once a second while anybody looks, and all pages are made of what it read. The
server of HTTP has a thread with an event loop; pages are made, and actions carried out, in threads of a pool.

Why: docs/decisions/0116.
"""
