"""What a configuration of Triton's (`config.pbtxt`) says of a model, in Carpool's words. Pure.

text_format   protobuf's text format: fields with their lines
schema        which fields a configuration may have
config        a configuration as a dict, as Triton gives it to Python models, every field with a value
refused       what has no counterpart, and what to do instead
scheduling    settings: of queues, batches and sequences
tensors       inputs and outputs
instances     devices and processes; versions
translation   all of it together
"""
