"""Ready-made models.

hf                the models for `hf:FOLDER` and `st:FOLDER`
triton            models of a repository of Triton's
square            the demo model, which takes as long as it says
onnx              the model for `onnx:FILE`
onnx_declaration  what is declared about an ONNX file beside its graph
onnx_probe        whether its outputs have the batch first, found with made-up requests
onnx_signature    the inputs and outputs of a graph by their roles
"""
