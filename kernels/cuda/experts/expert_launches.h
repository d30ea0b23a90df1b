#pragma once
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/experts/expert_args.h"
#include "kernels/cuda/products/quant_launches.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. The callers check the arguments (experts/expert_ops.h).
// Threads: any host thread, one at a time per stream.
int LaunchRoute(const RouteLaunch* launch, void* stream);
// From so many rows on, thread blocks take several; fewer would leave multiprocessors idle.
inline constexpr int kRouteTogetherFrom = 512;
// Fewer rows, whose experts the thread blocks of a cluster divide among them; kProductRefused: more rows, few experts,
// or a GPU of another compute capability than 9.0.
int LaunchRouteByCluster(const RouteLaunch* launch, void* stream);
int LaunchPlace(const PlaceLaunch* launch, void* stream);
int LaunchExpertGemm(const ExpertGemmLaunch* launch, void* stream);
// Tiles of kGroupedTileRows, on devices that run it.
bool GroupedProductRuns(const DeviceLimits* device);
int LaunchGroupedProduct(const ExpertGemmLaunch* launch, void* stream);
// The expert numbers of a sum are read before its predecessor has ended: LaunchPairGate of the same rows, or a kernel
// that lets no successor begin.
int LaunchPairGate(const PairGateLaunch* launch, void* stream);
int LaunchPairSum(const PairSumLaunch* launch, void* stream);
// Weights in 4 or 8 bits. kQuantTooWide: k is too large for shared memory.
int LaunchExpertCodes(const ExpertCodesLaunch* launch, void* stream);
int LaunchExpertCodesBF16(const ExpertCodesLaunch& launch, const QuantDevice& device, void* stream);
int LaunchExpertCodesF16(const ExpertCodesLaunch& launch, const QuantDevice& device, void* stream);
int LaunchExpertSum(const ExpertSumLaunch* launch, void* stream);
int LaunchGatedAdd(const GatedAddLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
