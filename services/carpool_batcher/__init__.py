"""The batcher service: reads requests, asks `core` what to do with them, and carries that out.

`service` has the loop. ARCHITECTURE.md says what each module does.
"""
