"""The messages of version 2 of KServe's service with Triton's extensions, and of standard ones.

Names and numbers are those of all clients and servers of these services. Of `ModelConfig` there is what a
model here has.
"""

from __future__ import annotations

from typing import Final

from carpool_gateway.rpc.definitions import Definitions

INFERENCE: Final = Definitions(
    "carpool/inference.proto",
    "inference.GRPCInferenceService",
    """
    rpc ServerLive: ServerLiveRequest -> ServerLiveResponse
    rpc ServerReady: ServerReadyRequest -> ServerReadyResponse
    rpc ModelReady: ModelReadyRequest -> ModelReadyResponse
    rpc ServerMetadata: ServerMetadataRequest -> ServerMetadataResponse
    rpc ModelMetadata: ModelMetadataRequest -> ModelMetadataResponse
    rpc ModelInfer: ModelInferRequest -> ModelInferResponse
    rpc ModelStreamInfer: ModelInferRequest* -> ModelStreamInferResponse*
    rpc ModelConfig: ModelConfigRequest -> ModelConfigResponse
    rpc ModelStatistics: ModelStatisticsRequest -> ModelStatisticsResponse
    rpc RepositoryIndex: RepositoryIndexRequest -> RepositoryIndexResponse
    rpc RepositoryModelLoad: RepositoryModelLoadRequest -> RepositoryModelLoadResponse
    rpc RepositoryModelUnload: RepositoryModelUnloadRequest -> RepositoryModelUnloadResponse

    ServerLiveRequest
    ServerLiveResponse: bool live 1
    ServerReadyRequest
    ServerReadyResponse: bool ready 1
    ModelReadyRequest: string name 1, string version 2
    ModelReadyResponse: bool ready 1
    ServerMetadataRequest
    ServerMetadataResponse: string name 1, string version 2, string* extensions 3
    ModelMetadataRequest: string name 1, string version 2
    ModelMetadataResponse: string name 1, string* versions 2, string platform 3, \
        TensorMetadata* inputs 4, TensorMetadata* outputs 5
    ModelMetadataResponse.TensorMetadata: string name 1, string datatype 2, int64* shape 3

    InferParameter: bool? bool_param 1, int64? int64_param 2, string? string_param 3, \
        double? double_param 4, uint64? uint64_param 5
    InferTensorContents: bool* bool_contents 1, int32* int_contents 2, int64* int64_contents 3, \
        uint32* uint_contents 4, uint64* uint64_contents 5, float* fp32_contents 6, double* fp64_contents 7, \
        bytes* bytes_contents 8
    ModelInferRequest: string model_name 1, string model_version 2, string id 3, \
        InferParameter% parameters 4, InferInputTensor* inputs 5, InferRequestedOutputTensor* outputs 6, \
        bytes* raw_input_contents 7
    ModelInferRequest.InferInputTensor: string name 1, string datatype 2, int64* shape 3, \
        InferParameter% parameters 4, InferTensorContents contents 5
    ModelInferRequest.InferRequestedOutputTensor: string name 1, InferParameter% parameters 2
    ModelInferResponse: string model_name 1, string model_version 2, string id 3, \
        InferParameter% parameters 4, InferOutputTensor* outputs 5, bytes* raw_output_contents 6
    ModelInferResponse.InferOutputTensor: string name 1, string datatype 2, int64* shape 3, \
        InferParameter% parameters 4, InferTensorContents contents 5
    ModelStreamInferResponse: string error_message 1, ModelInferResponse infer_response 2

    ModelConfigRequest: string name 1, string version 2
    ModelConfigResponse: ModelConfig config 1
    enum DataType: TYPE_INVALID 0, TYPE_BOOL 1, TYPE_UINT8 2, TYPE_UINT16 3, TYPE_UINT32 4, TYPE_UINT64 5, \
        TYPE_INT8 6, TYPE_INT16 7, TYPE_INT32 8, TYPE_INT64 9, TYPE_FP16 10, TYPE_FP32 11, TYPE_FP64 12, \
        TYPE_STRING 13, TYPE_BF16 14
    ModelInput: string name 1, DataType data_type 2, Format format 3, int64* dims 4, bool optional 8
    enum ModelInput.Format: FORMAT_NONE 0, FORMAT_NHWC 1, FORMAT_NCHW 2
    ModelOutput: string name 1, DataType data_type 2, int64* dims 3
    ModelVersionPolicy: Latest? latest 1
    ModelVersionPolicy.Latest: uint32 num_versions 1
    ModelDynamicBatching: int32* preferred_batch_size 1, uint64 max_queue_delay_microseconds 2, \
        bool preserve_ordering 3, uint64 priority_levels 4, uint64 default_priority_level 5
    ModelSequenceBatching: uint64 max_sequence_idle_microseconds 1
    ModelTransactionPolicy: bool decoupled 1
    ModelConfig: string name 1, string platform 2, ModelVersionPolicy version_policy 3, \
        int32 max_batch_size 4, ModelInput* input 5, ModelOutput* output 6, \
        ModelDynamicBatching? dynamic_batching 11, \
        ModelSequenceBatching? sequence_batching 13, string backend 17, \
        ModelTransactionPolicy model_transaction_policy 19

    ModelStatisticsRequest: string name 1, string version 2
    StatisticDuration: uint64 count 1, uint64 ns 2
    InferStatistics: StatisticDuration success 1, StatisticDuration fail 2, StatisticDuration queue 3, \
        StatisticDuration compute_input 4, StatisticDuration compute_infer 5, \
        StatisticDuration compute_output 6, StatisticDuration cache_hit 7, StatisticDuration cache_miss 8
    InferResponseStatistics: StatisticDuration compute_infer 1, StatisticDuration compute_output 2, \
        StatisticDuration success 3, StatisticDuration fail 4, StatisticDuration empty_response 5, \
        StatisticDuration cancel 6
    InferBatchStatistics: uint64 batch_size 1, StatisticDuration compute_input 2, \
        StatisticDuration compute_infer 3, StatisticDuration compute_output 4
    MemoryUsage: string type 1, int64 id 2, uint64 byte_size 3
    ModelStatistics: string name 1, string version 2, uint64 last_inference 3, uint64 inference_count 4, \
        uint64 execution_count 5, InferStatistics inference_stats 6, InferBatchStatistics* batch_stats 7, \
        MemoryUsage* memory_usage 8, InferResponseStatistics% response_stats 9
    ModelStatisticsResponse: ModelStatistics* model_stats 1

    RepositoryIndexRequest: string repository_name 1, bool ready 2
    RepositoryIndexResponse: ModelIndex* models 1
    RepositoryIndexResponse.ModelIndex: string name 1, string version 2, string state 3, string reason 4
    ModelRepositoryParameter: bool? bool_param 1, int64? int64_param 2, string? string_param 3, \
        bytes? bytes_param 4
    RepositoryModelLoadRequest: string repository_name 1, string model_name 2, \
        ModelRepositoryParameter% parameters 3
    RepositoryModelLoadResponse
    RepositoryModelUnloadRequest: string repository_name 1, string model_name 2, \
        ModelRepositoryParameter% parameters 3
    RepositoryModelUnloadResponse
    """,
)

HEALTH: Final = Definitions(
    "carpool/health.proto",
    "grpc.health.v1.Health",
    """
    rpc Check: HealthCheckRequest -> HealthCheckResponse
    rpc Watch: HealthCheckRequest -> HealthCheckResponse*

    HealthCheckRequest: string service 1
    HealthCheckResponse: ServingStatus status 1
    enum HealthCheckResponse.ServingStatus: UNKNOWN 0, SERVING 1, NOT_SERVING 2, SERVICE_UNKNOWN 3
    """,
)

_REFLECTION: Final = """
    rpc ServerReflectionInfo: ServerReflectionRequest* -> ServerReflectionResponse*

    ServerReflectionRequest: string host 1, string? file_by_filename 3, string? file_containing_symbol 4, \
        ExtensionRequest? file_containing_extension 5, string? all_extension_numbers_of_type 6, \
        string? list_services 7
    ExtensionRequest: string containing_type 1, int32 extension_number 2
    ServerReflectionResponse: string valid_host 1, ServerReflectionRequest original_request 2, \
        FileDescriptorResponse? file_descriptor_response 4, ListServiceResponse? list_services_response 6, \
        ErrorResponse? error_response 7
    FileDescriptorResponse: bytes* file_descriptor_proto 1
    ListServiceResponse: ServiceResponse* service 1
    ServiceResponse: string name 1
    ErrorResponse: int32 error_code 1, string error_message 2
    """
REFLECTIONS: Final = tuple(
    Definitions(
        f"carpool/reflection_{version}.proto", f"grpc.reflection.{version}.ServerReflection", _REFLECTION
    )
    for version in ("v1", "v1alpha")
)

# In which field of InferTensorContents the elements of a datatype are.
CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
