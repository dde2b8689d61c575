"""Which fields a configuration of Triton's may have, as its public model_config.proto names them. Pure.

In the table, `*` after a type says that a field is repeated, `{}` around it that it is a map, with texts as
keys (`{64 ...}`: with numbers), and `?` that it has no value unless it is given. `any` is what is refused as
a whole: nothing within it is read.
"""

from __future__ import annotations

from typing import Final, NamedTuple

ENUMS: Final[dict[str, tuple[str, ...]]] = {
    "DataType": (
        "TYPE_INVALID",
        *("TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64"),
        *("TYPE_INT8", "TYPE_INT16", "TYPE_INT32", "TYPE_INT64"),
        *("TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16"),
    ),
    "Format": ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"),
    "Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "Priority": ("PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"),
    "TimeoutAction": ("REJECT", "DELAY"),
    "ControlKind": (
        "CONTROL_SEQUENCE_START",
        "CONTROL_SEQUENCE_READY",
        "CONTROL_SEQUENCE_END",
        "CONTROL_SEQUENCE_CORRID",
    ),
}

CONFIG: Final = "ModelConfig"
_MESSAGES: Final = {
    CONFIG: """
        name:string platform:string backend:string runtime:string version_policy:VersionPolicy
        max_batch_size:int input:Input* output:Output* batch_input:any* batch_output:any*
        optimization:Optimization dynamic_batching:DynamicBatching sequence_batching:SequenceBatching
        ensemble_scheduling:any
        instance_group:InstanceGroup* default_model_filename:string cc_model_filenames:{string}
        metric_tags:{string} parameters:{Parameter} model_warmup:Warmup* model_operations:any
        model_transaction_policy:TransactionPolicy model_repository_agents:any response_cache:Enabled
        model_metrics:any""",
    "VersionPolicy": "latest:Latest all:Nothing specific:Specific",
    "Latest": "num_versions:int",
    "Nothing": "",
    "Specific": "versions:int*",
    "Reshape": "shape:int*",
    "Input": """
        name:string data_type:DataType format:Format dims:int* reshape:Reshape is_shape_tensor:bool
        allow_ragged_batch:bool optional:bool is_non_linear_format_io:bool""",
    "Output": """
        name:string data_type:DataType dims:int* reshape:Reshape label_filename:string is_shape_tensor:bool
        is_non_linear_format_io:bool""",
    "Optimization": """
        graph:any priority:Priority cuda:any execution_accelerators:any input_pinned_memory:any?
        output_pinned_memory:any? gather_kernel_buffer_threshold:int eager_batching:bool""",
    "QueuePolicy": """
        timeout_action:TimeoutAction default_timeout_microseconds:int allow_timeout_override:bool
        max_queue_size:int""",
    "DynamicBatching": """
        preferred_batch_size:int* max_queue_delay_microseconds:int preserve_ordering:bool priority_levels:int
        default_priority_level:int default_queue_policy:QueuePolicy priority_queue_policy:{64 QueuePolicy}""",
    "SequenceBatching": """
        direct:Direct oldest:Oldest max_sequence_idle_microseconds:int control_input:ControlInput*
        state:State* iterative_sequence:bool""",
    "Direct": "max_queue_delay_microseconds:int minimum_slot_utilization:float",
    "Oldest": """
        max_candidate_sequences:int preferred_batch_size:int* max_queue_delay_microseconds:int
        preserve_ordering:bool""",
    "ControlInput": "name:string control:Control*",
    "Control": """
        kind:ControlKind int32_false_true:int* fp32_false_true:float* bool_false_true:bool*
        data_type:DataType""",
    "State": """
        input_name:string output_name:string data_type:DataType dims:int* initial_state:InitialState*
        use_same_buffer_for_input_output:bool use_growable_memory:bool""",
    "InitialState": "data_type:DataType dims:int* zero_data:bool? data_file:string? name:string",
    "InstanceGroup": """
        name:string kind:Kind count:int rate_limiter:any gpus:int* secondary_devices:any* profile:string*
        passive:bool host_policy:string""",
    "Parameter": "string_value:string",
    "Warmup": "name:string batch_size:int inputs:{WarmupInput} count:int",
    "WarmupInput": "data_type:DataType dims:int* zero_data:bool? random_data:bool? input_data_file:string?",
    "TransactionPolicy": "decoupled:bool",
    "Enabled": "enable:bool",
}
# Of these fields of a message, one at most may be given.
ALTERNATIVES: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    CONFIG: (("dynamic_batching", "sequence_batching", "ensemble_scheduling"),),
    "VersionPolicy": (("latest", "all", "specific"),),
    "SequenceBatching": (("direct", "oldest"),),
    "InitialState": (("zero_data", "data_file"),),
    "WarmupInput": (("zero_data", "random_data", "input_data_file"),),
}


class Declared(NamedTuple):
    """A field of a message: its type, a name in MESSAGES, ENUMS, or string, bool, int, float, any."""

    type: str
    is_repeated: bool = False
    is_map: bool = False
    has_number_keys: bool = False
    is_optional: bool = False


def _declared(text: str) -> Declared:
    if text.startswith("{"):
        *number_keys, kind = text[1:-1].split("/")
        return Declared(kind, is_map=True, has_number_keys=bool(number_keys))
    kind = text.rstrip("*?")
    return Declared(kind, is_repeated="*" in text, is_optional="?" in text)


def _fields(text: str) -> dict[str, Declared]:
    pairs = [word.partition(":")[::2] for word in text.replace("{64 ", "{64/").split()]
    return {name: _declared(kind) for name, kind in pairs}


MESSAGES: Final = {name: _fields(text) for name, text in _MESSAGES.items()}
