"""The worker service: fetches batches, has them executed by its model processes, and commits their results.

`worker` starts all others. docs/modules.md says what each module does.
"""
