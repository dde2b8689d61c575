"""The batcher service: reads requests, asks `core` what to do with them, and carries that out.

`service` has the loop. docs/modules.md says what each module does.
"""
