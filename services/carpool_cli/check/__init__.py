"""`carpool check`: a model tried out in this process, without Redis.

command     reads the bodies, executes them alone and in batches, and shows what was found
bodies      what the BODY arguments name: values, files, folders
comparing   whether results are the same, but for rounding
resuming    streams that are cut, and resumed from their first chunks
repository  all models of a folder: what their files say, and whether they can be loaded
memory      how much more memory a batch needs
speaking    whether the gateway can read it, of a model that speaks OpenAI's API
"""
