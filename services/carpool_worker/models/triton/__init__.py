"""Models of a repository of Triton's, in their model process.

found           from a file and its configuration to the model
onnx_model      an ONNX file: its shapes, states and controls as the configuration declares them
python_model    a `TritonPythonModel`, that executes batches, also one that has sequences inside
decoupled       one that sends any number of responses
requests        from a batch to what such a model gets, and from its responses to results
calls           what such a model asks of others
warmup          requests that a configuration has it execute before it serves
backend_utils   what such a model imports as `triton_python_backend_utils`
"""
