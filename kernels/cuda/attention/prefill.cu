#include "kernels/cuda/attention/prefill_kernel.cuh"

namespace dovetail::kernels::cuda {
namespace {

template <KvType kType, bool kWireBF16, int D>
int LaunchDim(const PrefillLaunch& call, void* stream) {
  if (call.fold != nullptr)
    return LaunchPrefillShape<PrefillShape<kType, kWireBF16, D, PrefillForm::kFolds>>(call, stream);
  return call.join_count > 0 ? LaunchPrefillShape<PrefillShape<kType, kWireBF16, D, PrefillForm::kPieces>>(call, stream)
                             : LaunchPrefillShape<PrefillShape<kType, kWireBF16, D, PrefillForm::kWhole>>(call, stream);
}

template <KvType kType, bool kWireBF16>
int LaunchTyped(const PrefillLaunch& call, void* stream) {
  switch (call.layout.key_dim) {
    case 64: return LaunchDim<kType, kWireBF16, 64>(call, stream);
    case 80: return LaunchDim<kType, kWireBF16, 80>(call, stream);
    case 96: return LaunchDim<kType, kWireBF16, 96>(call, stream);
    case 128: return LaunchDim<kType, kWireBF16, 128>(call, stream);
    case 256: return LaunchDim<kType, kWireBF16, 256>(call, stream);
    default: return static_cast<int>(cudaErrorInvalidValue);
  }
}

int LaunchTiles(const PrefillLaunch& launch, void* stream) {
  const bool bf16 = launch.q_type == WireType::kBF16;
  if (launch.layout.type == KvType::kE4M3)
    return bf16 ? LaunchTyped<KvType::kE4M3, true>(launch, stream) : LaunchTyped<KvType::kE4M3, false>(launch, stream);
  return bf16 ? LaunchTyped<KvType::kBF16, true>(launch, stream) : LaunchTyped<KvType::kF16, false>(launch, stream);
}

// Whether this library has the code for Hopper, and not only what drivers compile for any GPU.
bool HasCode() {
  static const bool has = [] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes,
                                 PrefillKernel<PrefillShape<KvType::kBF16, true, 128, PrefillForm::kWhole>>) ==
               cudaSuccess &&
           attributes.binaryVersion == 90 && attributes.ptxVersion >= 90;
  }();
  return has;
}

}  // namespace

bool PrefillTakes(const CudaKvLayout* layout, WireType q_type, size_t arena_bytes, const DeviceLimits* limits) {
  if (limits->major != 9 || limits->minor != 0 || layout->key_dim != layout->value_dim) return false;
  if (q_type == WireType::kF32) return false;
  if (layout->type != KvType::kE4M3 && layout->type != (q_type == WireType::kBF16 ? KvType::kBF16 : KvType::kF16))
    return false;
  switch (layout->key_dim) {
    case 64:
    case 80:
    case 96:
    case 128:
    case 256: break;
    default: return false;
  }
  // The map's coordinates have 31 bits.
  return arena_bytes / PrefillUnit(layout->key_dim) < size_t{1} << 30 && HasCode();
}

int LaunchPrefill(const PrefillLaunch* launch, void* stream) {
  const int error = LaunchTiles(*launch, stream);
  return error != 0 ? error : LaunchPrefillJoin(*launch, stream);
}

}  // namespace dovetail::kernels::cuda
