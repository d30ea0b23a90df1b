#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/attention/merge_args.h"
#include "kernels/cuda/attention/pack_heads_args.h"
#include "kernels/cuda/attention/prefill_args.h"
#include "kernels/cuda/exchange/copy_runs_args.h"
#include "kernels/cuda/exchange/exchange_args.h"
#include "kernels/cuda/experts/expert_args.h"
#include "kernels/cuda/products/quant_args.h"
#include "kernels/cuda/rows/activation_args.h"
#include "kernels/cuda/rows/append_args.h"
#include "kernels/cuda/rows/elementwise_args.h"
#include "kernels/cuda/rows/norm_args.h"
#include "kernels/cuda/sampling/sampling_args.h"
#include "kernels/cuda/state/layer_args.h"
#include "kernels/cuda/state/state_args.h"
#include "kernels/cuda/state/state_pack_args.h"

namespace dovetail::kernels::cuda {

// What libdovetail_cuda.so offers to the rest of Dovetail, which opens it at run time (cuda_library.h) and links
// nothing of CUDA. Plain functions and structs, no exceptions, no C++ types of variable layout. `int` results are
// cudaError_t (0: done) unless said otherwise; error_text explains them. Functions with a stream only enqueue, except
// stream_synchronize, and gemm_run where it measures algorithms for a new shape.
// Threads: thread-safe.
inline constexpr uint32_t kBackendAbi = 20;

struct DeviceInfo {
  char name[256];
  int major, minor;
  int multiprocessors;
  int shared_bytes;  // that one thread block may have
  int l2_bytes;
  size_t memory_bytes;
  char pci[32];
};

// Names device memory to other processes of its machine.
struct MemoryHandle {
  unsigned char bytes[64];
};

enum class GemmType : int32_t { kBF16 = 0, kF16 = 1 };

// y = x w^T (+ y), x [m][k], w [n][k], y [m][n]; x and w of one type, y of that type or f32, sums in f32. Where y has
// 16 bits, cuBLASLt may round the product before it adds y. With `parts` above 1, y is so many matrices whose sum is
// the product, of k / parts columns each, for the next reader of y to add up (RmsNormLaunch): in f32, no bias, y not
// added.
struct GemmCall {
  const void* x;
  const void* w;
  void* y;
  const void* bias;  // [n] in the type of y, or null
  int64_t m, n, k;
  int64_t x_stride, w_stride, y_stride;  // elements
  GemmType type;
  int32_t y_is_f32;
  int32_t accumulate;
  int32_t w_is_new;   // a kernel that may still run writes w: it is not read before that has ended
  int32_t parts;      // 0 is 1
  int64_t part_step;  // from part to part, elements
  // The algorithm is chosen, as the first call of the shape does, and nothing is enqueued. x and w are read meanwhile.
  int32_t only_choose;
  // Sums are made in one order, whatever m (in_order_product.h): rows have the same bits alone and among others.
  int32_t in_order;
};

// y = act(gate) * up with gate = x w[0..n)^T and up = x w[n..2n)^T: x [m][k], w [2 n][k], y [m][n], all of one type.
struct GatedProductCall {
  const void* x;
  const void* w;
  void* y;
  int64_t m, n, k;
  int64_t x_stride, w_stride, y_stride;  // elements
  GemmType type;
  int32_t gelu;           // else SiLU
  int32_t rounds_halves;  // gate and up are rounded to y's type first, as where they are a product of their own
};
// Not a shape, or not a GPU, that the kernel is for: two products and an activation do the same.
inline constexpr int kProductRefused = -5;

// Rows of so many columns do not fit into shared memory, and y is not f32, to which ranges of columns could be added.
inline constexpr int kQuantTooWide = -4;

struct Backend {
  uint32_t abi;
  const char* (*error_text)(int error);
  bool (*is_out_of_memory)(int error);

  // Versions as CUDA counts them, 13000 for 13.0; driver 0: none installed.
  int (*versions)(int* driver, int* runtime);
  int (*device_count)(int* count);
  int (*device_info)(int device, DeviceInfo* info);
  // Whether this library holds code that the device can run (machine code or PTX that its driver compiles).
  int (*has_code)(int device, bool* has);
  int (*memory_info)(int device, size_t* free_bytes, size_t* total_bytes);

  int (*use_device)(int device);  // of this thread's following launches
  // From here on copies and kernels of `device` reach the memory of `peer`, if the two are connected so.
  int (*reach_peer)(int device, int peer, bool* reaches);
  int (*allocate)(int device, size_t bytes, void** memory);
  int (*release)(int device, void* memory);
  // What other processes of this machine open memory of `allocate` with, from its first byte. Opened there, it is read
  // like memory of that device until it is closed; it must not be released before.
  int (*export_memory)(int device, void* memory, MemoryHandle* handle);
  int (*open_memory)(int device, const MemoryHandle* handle, void** memory, size_t* bytes);
  int (*close_memory)(int device, void* memory);
  int (*allocate_pinned)(int device, size_t bytes, void** memory);
  int (*release_pinned)(void* memory);

  int (*stream_create)(int device, void** stream);
  int (*stream_destroy)(int device, void* stream);
  int (*stream_synchronize)(void* stream);
  int (*event_create)(int device, bool timed, void** event);
  int (*event_destroy)(void* event);
  int (*event_record)(void* event, void* stream);
  int (*event_done)(void* event, bool* done);
  int (*event_synchronize)(void* event);         // the host waits
  int (*event_wait)(void* event, void* stream);  // the stream waits
  int (*event_milliseconds)(void* from, void* to, float* milliseconds);
  int (*copy)(void* to, const void* from, size_t bytes, void* stream);  // any direction
  // `rows` rows of `row_bytes` bytes, which begin every so many bytes.
  int (*copy_rows)(void* to, size_t to_step, const void* from, size_t from_step, size_t row_bytes, size_t rows,
                   void* stream);
  int (*fill)(void* memory, uint8_t value, size_t bytes, void* stream);

  // What a stream is given between begin and end is recorded, not run; launching the graph runs it again and again.
  int (*capture_begin)(void* stream);
  int (*capture_end)(void* stream, void** graph);
  int (*graph_launch)(void* graph, void* stream);
  int (*graph_destroy)(void* graph);

  int (*attention)(const AttentionLaunch* launch, const DeviceLimits* limits, void* stream);
  // prefill_args.h: the same for many rows, on devices that it runs on.
  bool (*prefill_takes)(const CudaKvLayout* layout, WireType q_type, size_t arena_bytes, const DeviceLimits* limits);
  int (*prefill)(const PrefillLaunch* launch, void* stream);
  // Reads memory once, at the best rate a kernel gets: what attention is measured against. `result` is 4 bytes.
  int (*read_all)(const void* memory, size_t bytes, void* result, void* stream);
  int (*merge)(const MergeLaunch* launch, void* stream);
  int (*pack_heads)(const PackHeadsLaunch* launch, void* stream);
  int (*kv_append)(const KvAppendLaunch* launch, void* stream);
  int (*rope_table)(const RopeTableLaunch* launch, void* stream);
  int (*rms_norm)(const RmsNormLaunch* launch, void* stream);
  int (*gated_activation)(const ActivationLaunch* launch, void* stream);
  int (*gated_product)(const GatedProductCall* call, const DeviceLimits* device, void* stream);  // or kProductRefused
  int (*embed)(const EmbedLaunch* launch, void* stream);
  int (*combine)(const CombineLaunch* launch, void* stream);
  int (*random)(const RandomLaunch* launch, void* stream);
  int (*sample)(const SampleLaunch* launch, void* stream);
  int (*state_append)(const StateLaunch* launch, void* stream);
  int (*state_decode)(const StateLaunch* launch, void* stream);
  int (*state_chunk_prepare)(const StateLaunch* launch, void* stream);
  int (*state_chunks)(const StateLaunch* launch, void* stream);
  int (*state_pack)(const StatePackLaunch* launch, void* stream);
  int (*state_unpack)(const StatePackLaunch* launch, void* stream);
  int (*state_inputs)(const StateInputsLaunch* launch, void* stream);
  int (*state_gates)(const StateGatesLaunch* launch, void* stream);
  int (*output_gate)(const OutputGateLaunch* launch, void* stream);
  int (*join_keys)(const JoinKeysLaunch* launch, void* stream);
  int (*mlp_activation)(const MlpActivationLaunch* launch, void* stream);
  int (*gated_add)(const GatedAddLaunch* launch, void* stream);
  int (*route)(const RouteLaunch* launch, void* stream);
  int (*place)(const PlaceLaunch* launch, void* stream);
  int (*expert_gemm)(const ExpertGemmLaunch* launch, void* stream);
  bool (*grouped_product_runs)(const DeviceLimits* limits);  // tiles of kGroupedTileRows
  int (*grouped_product)(const ExpertGemmLaunch* launch, void* stream);
  int (*pair_gate)(const PairGateLaunch* launch, void* stream);
  int (*pair_sum)(const PairSumLaunch* launch, void* stream);
  int (*expert_codes)(const ExpertCodesLaunch* launch, void* stream);  // cudaError_t or kQuantTooWide
  int (*expert_sum)(const ExpertSumLaunch* launch, void* stream);
  int (*quant_gemm)(const QuantGemmLaunch* launch, void* stream);  // cudaError_t or kQuantTooWide
  int (*quant_unpack)(const QuantUnpackLaunch* launch, void* stream);
  int (*quant_embed)(const QuantEmbedLaunch* launch, void* stream);

  // cuBLASLt, opened at run time. gemm_open: 0, or a cublasStatus_t + 10000, or -1 with a text of what is missing.
  int (*gemm_open)(int device, size_t workspace_bytes, void** gemm, char* text, size_t text_bytes);
  int (*gemm_close)(void* gemm);
  // Few rows are a kernel of ours (skinny_gemm.h). For others the first call of a shape chooses an algorithm: up to 512
  // rows by time, which waits for the stream and takes milliseconds, unless it records a graph. Later calls only
  // enqueue.
  int (*gemm_run)(void* gemm, const GemmCall* call, void* stream);

  int (*exchange_await)(const ExchangeAwaitLaunch* launch, void* stream);
  int (*exchange_give_turn)(const ExchangeGiveTurnLaunch* launch, void* stream);
  int (*exchange_signal)(const ExchangeSignalLaunch* launch, void* stream);
  int (*exchange_push)(const ExchangePushLaunch* launch, void* stream);
  int (*exchange_await_all)(const ExchangeAwaitAllLaunch* launch, void* stream);
  int (*exchange_gather)(const ExchangeGatherLaunch* launch, void* stream);
  int (*exchange_copies)(const ExchangeCopiesLaunch* launch, void* stream);
  int (*copy_runs)(const CopyRunsLaunch* launch, void* stream);
  int (*exchange_joins)(const ExchangeJoinsLaunch* launch, void* stream);
  // exchange_launches.h; -1 in a library built without UCX's device API.
  int (*ucx_peer_pointer)(int device, void* list, unsigned index, void** pointer);
};

}  // namespace dovetail::kernels::cuda

// The only symbol that is looked up.
extern "C" const dovetail::kernels::cuda::Backend* dovetail_cuda_backend();
