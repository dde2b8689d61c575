"""The worker service: fetches batches, has them executed by its model processes, and commits their results.

`worker` starts all others. ARCHITECTURE.md says what each module does.
"""
