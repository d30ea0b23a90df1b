#include "kernels/cuda/attention/merge_launches.h"
#include "kernels/cuda/backend_abi.h"
#include "kernels/cuda/exchange/exchange_launches.h"
#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/products/gated_product.h"
#include "kernels/cuda/products/gemm_lt.h"
#include "kernels/cuda/products/quant_launches.h"
#include "kernels/cuda/rows/append_launches.h"
#include "kernels/cuda/rows/elementwise_launches.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/cuda/sampling/sampling_launches.h"
#include "kernels/cuda/state/layer_launches.h"
#include "kernels/cuda/state/state_launches.h"
#include "kernels/cuda/state/state_pack_launches.h"

namespace dovetail::kernels::cuda {
namespace {

int Attention(const AttentionLaunch* launch, const DeviceLimits* limits, void* stream) {
  switch (launch->layout.type) {
    case KvType::kBF16: return LaunchAttentionBF16(*launch, *limits, stream);
    case KvType::kF16: return LaunchAttentionF16(*launch, *limits, stream);
    case KvType::kE4M3: return LaunchAttentionE4M3(*launch, *limits, stream);
  }
  return 1;  // cudaErrorInvalidValue
}

constexpr Backend kBackend = {
    .abi = kBackendAbi,
    .error_text = runtime::ErrorText,
    .is_out_of_memory = runtime::IsOutOfMemory,
    .versions = runtime::Versions,
    .device_count = runtime::DeviceCount,
    .device_info = runtime::GetDeviceInfo,
    .has_code = runtime::HasCode,
    .memory_info = runtime::MemoryInfo,
    .use_device = runtime::UseDevice,
    .reach_peer = runtime::ReachPeer,
    .allocate = runtime::Allocate,
    .release = runtime::Release,
    .export_memory = runtime::ExportMemory,
    .open_memory = runtime::OpenMemory,
    .close_memory = runtime::CloseMemory,
    .allocate_pinned = runtime::AllocatePinned,
    .release_pinned = runtime::ReleasePinned,
    .stream_create = runtime::StreamCreate,
    .stream_destroy = runtime::StreamDestroy,
    .stream_synchronize = runtime::StreamSynchronize,
    .event_create = runtime::EventCreate,
    .event_destroy = runtime::EventDestroy,
    .event_record = runtime::EventRecord,
    .event_done = runtime::EventDone,
    .event_synchronize = runtime::EventSynchronize,
    .event_wait = runtime::EventWait,
    .event_milliseconds = runtime::EventMilliseconds,
    .copy = runtime::Copy,
    .copy_rows = runtime::CopyRows,
    .fill = runtime::Fill,
    .capture_begin = runtime::CaptureBegin,
    .capture_end = runtime::CaptureEnd,
    .graph_launch = runtime::GraphLaunch,
    .graph_destroy = runtime::GraphDestroy,
    .attention = Attention,
    .prefill_takes = PrefillTakes,
    .prefill = LaunchPrefill,
    .read_all = LaunchReadAll,
    .merge = LaunchMerge,
    .pack_heads = LaunchPackHeads,
    .kv_append = LaunchKvAppend,
    .rope_table = LaunchRopeTable,
    .rms_norm = LaunchRmsNorm,
    .gated_activation = LaunchGatedActivation,
    .gated_product = LaunchGatedProduct,
    .embed = LaunchEmbed,
    .combine = LaunchCombine,
    .random = LaunchRandom,
    .sample = LaunchSample,
    .state_append = LaunchStateAppend,
    .state_decode = LaunchStateDecode,
    .state_chunk_prepare = LaunchStateChunkPrepare,
    .state_chunks = LaunchStateChunks,
    .state_pack = LaunchStatePack,
    .state_unpack = LaunchStateUnpack,
    .state_inputs = LaunchStateInputs,
    .state_gates = LaunchStateGates,
    .output_gate = LaunchOutputGate,
    .join_keys = LaunchJoinKeys,
    .mlp_activation = LaunchMlpActivation,
    .gated_add = LaunchGatedAdd,
    .route = LaunchRoute,
    .place = LaunchPlace,
    .expert_gemm = LaunchExpertGemm,
    .grouped_product_runs = GroupedProductRuns,
    .grouped_product = LaunchGroupedProduct,
    .pair_gate = LaunchPairGate,
    .pair_sum = LaunchPairSum,
    .expert_codes = LaunchExpertCodes,
    .expert_sum = LaunchExpertSum,
    .quant_gemm = LaunchQuantGemm,
    .quant_unpack = LaunchQuantUnpack,
    .quant_embed = LaunchQuantEmbed,
    .gemm_open = GemmOpen,
    .gemm_close = GemmClose,
    .gemm_run = GemmRun,
    .exchange_await = LaunchExchangeAwait,
    .exchange_give_turn = LaunchExchangeGiveTurn,
    .exchange_signal = LaunchExchangeSignal,
    .exchange_push = LaunchExchangePush,
    .exchange_await_all = LaunchExchangeAwaitAll,
    .exchange_gather = LaunchExchangeGather,
    .exchange_copies = LaunchExchangeCopies,
    .copy_runs = LaunchCopyRuns,
    .exchange_joins = LaunchExchangeJoins,
    .ucx_peer_pointer = UcxPeerPointer,
};

}  // namespace
}  // namespace dovetail::kernels::cuda

extern "C" __attribute__((visibility("default"))) const dovetail::kernels::cuda::Backend* dovetail_cuda_backend() {
  return &dovetail::kernels::cuda::kBackend;
}
