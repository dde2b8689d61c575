"""ONNX files whose inputs are padded, and whose outputs are cut back, as their TOML files declare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from carpool.wire.tensors import TensorSpec
from carpool_worker.models.onnx import OnnxModel
from support import tiny_onnx
from support.executions import codec_of_model, executed_by, prepared, request_of
from support.tiny_onnx import Node, Value

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("onnx_in_one_thread")

# Doubles ids, and tells the lengths.
GRAPH = tiny_onnx.model(
    [Value("ids", ["N", "L"], tiny_onnx.INT64), Value("lengths", ["N", 1], tiny_onnx.INT32)],
    [Value("doubled", ["N", "L"], tiny_onnx.INT64), Value("told", ["N", 1], tiny_onnx.INT32)],
    [Node("Add", ["ids", "ids"], ["doubled"]), Node("Identity", ["lengths"], ["told"])],
)
PADDING = '[padding.ids]\nbuckets = [4, 8]\npad = -1\nlengths = "lengths"\n'
CUT = '[cut]\ndoubled = "ids"\n'


def written(folder: Path, toml: str) -> OnnxModel:
    path = folder / "tiny.onnx"
    path.write_bytes(GRAPH)
    path.with_suffix(".toml").write_text(toml)
    return OnnxModel(path)


def test_requests_of_several_lengths_are_one_batch_and_results_have_their_lengths(tmp_path: Path) -> None:
    codec, model = codec_of_model(written(tmp_path, PADDING + CUT))
    spec = TensorSpec("ids", "INT64", (-1,), pad=-1, buckets=[4, 8], lengths="lengths")
    assert model.inputs == (spec,)
    bodies = [list(range(size)) for size in (5, 8, 6, 7, 5)]
    execution = prepared(codec, *map(request_of, bodies))
    (frame,) = execution.frames
    header, payload = executed_by(model, frame)
    assert header.executed_together == len(bodies)
    codec.give_results(execution, frame, header, payload)
    execution.separate()
    for position, body in enumerate(bodies):
        result = execution.results[position]
        assert result.body is not None
        data = b"[" + ",".join(map(str, np.array(body) * 2)).encode() + b"]"
        assert b'"data":' + data in result.body
        assert b'"data":[%d]' % len(body) in result.body


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[padding.idz]\nbuckets = [4]", "padding.idz: the file has no input 'idz'; it has ids, lengths"),
        ("[padding.ids]\nbucket = [4]", "padding.ids.bucket: unknown key; valid are buckets, pad, lengths"),
        ("[padding.ids]\npad = 1", "padding.ids.buckets: is missing"),
        ("[padding.ids]\nbuckets = [0]", "padding.ids: tensor 'ids': buckets: [0] must be a list of sizes"),
        ("[padding.ids]\nbuckets = { x = [4] }", "padding.ids.buckets: its keys must be axes"),
        ('[padding.ids]\nbuckets = [4]\nlengths = "n"', "padding.ids: the file has no input 'n'"),
        (CUT, "cut.doubled: 'ids' is no input that is padded; such are: none"),
        (PADDING + '[cut]\ny = "ids"', "cut.y: the file has no output 'y'; it has doubled, told"),
        (PADDING + '[cut]\ntold = "ids"', "cut.told: tensor 'told': 'cut' is for dimensions that vary"),
    ],
)
def test_what_does_not_fit_the_graph_is_an_error_with_the_key(
    tmp_path: Path, toml: str, message: str
) -> None:
    model = written(tmp_path, toml)
    with pytest.raises(ValueError, match=r"tiny\.toml") as error:
        model.load("cpu")
    assert message in str(error.value)
