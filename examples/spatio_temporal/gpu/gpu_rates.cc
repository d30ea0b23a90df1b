#include "examples/spatio_temporal/gpu/gpu_rates.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/spatio_temporal/gpu/gpu_block.h"
#include "examples/spatio_temporal/gpu/gpu_exchange.h"
#include "examples/spatio_temporal/gpu/gpu_sequences.h"
#include "examples/spatio_temporal/gpu/gpu_weights.h"
#include "kernels/cuda/exchange/cuda_exchange.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::spatio_temporal {
namespace {

using kernels::Buffer;
using kernels::cuda::CudaDevice;
using kernels::cuda::CudaEvent;
using kernels::cuda::CudaStream;

constexpr int kRepeats = 7;
constexpr int64_t kCopyBytes = int64_t{256} << 20;

// Median of the times of `work`, after two that are not counted.
absl::StatusOr<double> SecondsOf(CudaDevice& device, CudaStream& stream, const std::function<absl::Status()>& work) {
  std::vector<double> seconds;
  for (int i = -2; i < kRepeats; ++i) {
    DT_ASSIGN_OR_RETURN(CudaEvent begin, device.CreateEvent(true));
    DT_ASSIGN_OR_RETURN(CudaEvent end, device.CreateEvent(true));
    DT_RETURN_IF_ERROR(stream.Record(begin));
    DT_RETURN_IF_ERROR(work());
    DT_RETURN_IF_ERROR(stream.Record(end));
    DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
    DT_ASSIGN_OR_RETURN(const float milliseconds, end.MillisecondsSince(begin));
    if (i >= 0) seconds.push_back(milliseconds / 1e3);
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRepeats / 2, seconds.end());
  return seconds[kRepeats / 2];
}

absl::StatusOr<std::unique_ptr<Buffer>> Random(CudaDevice& device, CudaStream& stream, int64_t count) {
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer, device.Allocate(count * sizeof(BF16)));
  kernels::cuda::RandomLaunch random;
  random.out = buffer->data();
  random.seed = 1;
  random.count = count;
  DT_RETURN_IF_ERROR(kernels::cuda::FillRandom(stream, random));
  return buffer;
}

int64_t HeadRow(const Config& config) { return int64_t{config.heads} * PaddedHeadDim(config.head_dim()); }

absl::Status MeasureBlock(const RunOptions& options, CudaDevice& device, CudaStream& stream, GpuRates& rates) {
  Config config = options.config;
  config.pairs = 1;
  const int64_t rows = options.chunk_rows, c = config.channels, head_row = HeadRow(config);
  DT_ASSIGN_OR_RETURN(const GpuWeights weights, GpuWeights::Random(config, device));
  DT_ASSIGN_OR_RETURN(const auto block, GpuBlock::Create(config, device, rows));
  DT_ASSIGN_OR_RETURN(const auto x, Random(device, stream, rows * c));
  DT_ASSIGN_OR_RETURN(const auto qkv, Random(device, stream, rows * 3 * head_row));
  DT_ASSIGN_OR_RETURN(const auto o, Random(device, stream, rows * head_row));
  const auto elements = [](const std::unique_ptr<Buffer>& buffer) { return reinterpret_cast<BF16*>(buffer->data()); };
  DT_ASSIGN_OR_RETURN(rates.project_seconds, SecondsOf(device, stream, [&] {
                        return block->Project(stream, weights.spatial[0], elements(x), rows, elements(qkv));
                      }));
  DT_ASSIGN_OR_RETURN(rates.finish_seconds, SecondsOf(device, stream, [&] {
                        return block->Finish(stream, weights.spatial[0], elements(o), rows, elements(x));
                      }));
  DT_ASSIGN_OR_RETURN(const double products,
                      SecondsOf(device, stream, [&] { return block->ProductsOnly(stream, weights.spatial[0], rows); }));
  rates.product_flops = 2.0 * rows * c * (4 * head_row + 3 * config.mlp()) / products;
  return absl::OkStatus();
}

// A row's share of the attention of `shape`.
absl::StatusOr<double> SecondsARow(CudaDevice& device, CudaStream& stream, const SequenceShape& shape,
                                   int64_t head_row) {
  const int64_t rows = shape.count * shape.length;
  DT_ASSIGN_OR_RETURN(const auto sequences, GpuSequences::Create(device, shape));
  DT_ASSIGN_OR_RETURN(const auto qkv, Random(device, stream, rows * 3 * head_row));
  DT_ASSIGN_OR_RETURN(const auto o, Random(device, stream, rows * head_row));
  DT_ASSIGN_OR_RETURN(const double seconds, SecondsOf(device, stream, [&] {
                        return sequences->Attend(stream, reinterpret_cast<const BF16*>(qkv->data()),
                                                 reinterpret_cast<BF16*>(o->data()));
                      }));
  return seconds / static_cast<double>(rows);
}

absl::Status MeasureAttention(const RunOptions& options, CudaDevice& device, CudaStream& stream, GpuRates& rates) {
  const Config& config = options.config;
  const int64_t s = config.positions, head_row = HeadRow(config);
  SequenceShape shape;
  shape.heads = config.heads;
  shape.head_dim = static_cast<int>(config.head_dim());
  shape.count = std::clamp<int64_t>(options.chunk_rows / s, 1, config.frames);
  shape.length = s;
  shape.padded = true;
  DT_ASSIGN_OR_RETURN(rates.spatial_seconds, SecondsARow(device, stream, shape, head_row));
  rates.spatial_flops = 4.0 * static_cast<double>(s) * static_cast<double>(head_row) / rates.spatial_seconds;
  shape.length = config.frames;
  shape.count = std::clamp<int64_t>(options.chunk_rows / config.frames, 1, s);
  shape.by_token = true;
  DT_ASSIGN_OR_RETURN(rates.temporal_seconds, SecondsARow(device, stream, shape, head_row));
  return absl::OkStatus();
}

absl::Status MeasureLink(const RunOptions& options, CudaDevice& device, CudaDevice& peer, CudaStream& stream,
                         GpuRates& rates) {
  DT_ASSIGN_OR_RETURN(const bool reaches, device.ReachPeer(peer));
  if (!reaches) return FailedPrecondition(device.name(), " does not reach the memory of ", peer.name());
  DT_ASSIGN_OR_RETURN(const auto from, device.Allocate(kCopyBytes));
  DT_ASSIGN_OR_RETURN(const auto to, peer.Allocate(kCopyBytes));
  DT_ASSIGN_OR_RETURN(const double one_piece,
                      SecondsOf(device, stream, [&] { return stream.Copy(to->data(), from->data(), kCopyBytes); }));
  rates.copy_bytes = kCopyBytes / one_piece;
  const Config& config = options.config;
  const int ranks = std::max(2, options.ranks), padded = 2 * PaddedHeadDim(config.head_dim());
  kernels::cuda::CopyRunsLaunch runs;
  runs.from = from->data();
  runs.to = to->data();
  runs.from_row_step = 3 * config.heads * padded;
  runs.runs = std::max(1, config.heads / ranks);
  runs.from_run_step = padded;
  runs.to_run_step = runs.run_bytes = static_cast<int32_t>(2 * config.head_dim());
  runs.to_row_step = 3 * runs.runs * runs.run_bytes;
  runs.rows = static_cast<int32_t>(kCopyBytes / runs.from_row_step);
  runs.blocks = GpuExchange::kCopyBlocks;
  DT_ASSIGN_OR_RETURN(const double in_runs,
                      SecondsOf(device, stream, [&] { return kernels::cuda::CopyRuns(stream, runs); }));
  rates.runs_bytes = static_cast<double>(BytesOf(runs)) / in_runs;
  return absl::OkStatus();
}

}  // namespace

double GpuRates::ComputeSeconds(const Config& config, int ranks) const {
  const double rows = static_cast<double>(config.frames * config.positions) / ranks;
  return rows * (2 * (project_seconds + finish_seconds) / chunk_rows + spatial_seconds + temporal_seconds);
}

absl::StatusOr<double> GpuRates::ExchangeSeconds(const Config& config, Way way, int ranks) const {
  if (ranks == 1) return 0.0;
  DT_ASSIGN_OR_RETURN(const int64_t bytes, FormulaBytesOfPair(config, way, ranks));
  return static_cast<double>(bytes) / ranks / (way == Way::kDsp ? copy_bytes : runs_bytes);
}

absl::StatusOr<GpuRates> MeasureRates(const RunOptions& options) {
  DT_RETURN_IF_ERROR(options.Validate());
  if (options.config.exchange_only || options.devices.empty())
    return InvalidArgument("--rates measures what GPUs compute: give --devices and leave --exchange-only out");
  DT_ASSIGN_OR_RETURN(const auto library, kernels::cuda::CudaLibrary::Open());
  DT_ASSIGN_OR_RETURN(const int index, kernels::cuda::ParseCudaName(options.devices[0]));
  DT_ASSIGN_OR_RETURN(const auto device, CudaDevice::Create(library, {.index = index}));
  DT_ASSIGN_OR_RETURN(const auto stream, device->CreateCudaStream());
  GpuRates rates;
  rates.chunk_rows = static_cast<double>(options.chunk_rows);
  DT_RETURN_IF_ERROR(MeasureBlock(options, *device, *stream, rates));
  DT_RETURN_IF_ERROR(MeasureAttention(options, *device, *stream, rates));
  if (options.devices.size() < 2) return rates;
  DT_ASSIGN_OR_RETURN(const int other, kernels::cuda::ParseCudaName(options.devices[1]));
  DT_ASSIGN_OR_RETURN(const auto peer, CudaDevice::Create(library, {.index = other}));
  DT_RETURN_IF_ERROR(MeasureLink(options, *device, *peer, *stream, rates));
  return rates;
}

std::string DescribeRates(const RunOptions& options, const GpuRates& rates) {
  std::string text = absl::StrFormat(
      "%s, %s, products of %d rows\n"
      "  norm, q, k, v       %.3f ms\n"
      "  out, norm, MLP      %.3f ms\n"
      "  products alone      %.0f TFLOP/s\n"
      "  attention           %.2f ns a row over positions (%.0f TFLOP/s, packing counted), %.2f over frames\n",
      options.devices[0], options.config.DebugString(), options.chunk_rows, rates.project_seconds * 1e3,
      rates.finish_seconds * 1e3, rates.product_flops / 1e12, rates.spatial_seconds * 1e9, rates.spatial_flops / 1e12,
      rates.temporal_seconds * 1e9);
  absl::StrAppendFormat(&text, "  predicted, a pair   %.3f ms computed by each of %d ranks\n",
                        rates.ComputeSeconds(options.config, options.ranks) * 1e3, options.ranks);
  if (rates.copy_bytes == 0) return text;
  absl::StrAppendFormat(&text, "  link to %s      %.0f GB/s in one piece, %.0f in runs of heads\n", options.devices[1],
                        rates.copy_bytes / 1e9, rates.runs_bytes / 1e9);
  for (const Way way : {Way::kDsp, Way::kUlysses}) {
    const auto seconds = rates.ExchangeSeconds(options.config, way, options.ranks);
    if (seconds.ok())
      absl::StrAppendFormat(&text, "  predicted, %-8s %.3f ms sent by each rank\n", std::string(NameOf(way)),
                            *seconds * 1e3);
  }
  return text;
}

}  // namespace dovetail::spatio_temporal
