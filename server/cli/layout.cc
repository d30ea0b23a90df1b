#include "server/cli/layout.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/log.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/cuda_library.h"

namespace dovetail::cli {
namespace {

bool Alike(const GpuOfMachine& one, const GpuOfMachine& other) {
  return std::strcmp(one.info.name, other.info.name) == 0 && one.info.memory_bytes == other.info.memory_bytes;
}

bool ComputesLess(const GpuOfMachine& one, const GpuOfMachine& other) {
  const auto rank = [](const GpuOfMachine& gpu) {
    return std::make_tuple(gpu.info.major, gpu.info.minor, gpu.info.multiprocessors);
  };
  return rank(one) < rank(other);
}

std::string Text(const GpuOfMachine& gpu) { return absl::StrCat(gpu.name, " (", gpu.info.name, ")"); }

Layout PairsOn(const std::vector<GpuOfMachine>& gpus, const std::string& why) {
  Layout layout{.pairs = true, .why = why};
  for (const GpuOfMachine& gpu : gpus) layout.layers.push_back(gpu.name);
  return layout;
}

// Layers on the GPU that computes fastest, and K and V on the others.
Layout SplitOver(const std::vector<GpuOfMachine>& gpus) {
  const auto fastest = std::max_element(gpus.begin(), gpus.end(), ComputesLess);
  Layout layout{.layers = {fastest->name}};
  for (const GpuOfMachine& gpu : gpus)
    if (gpu.name != fastest->name) layout.attention.push_back(gpu.name);
  layout.why = absl::StrCat("layers on ", Text(*fastest), ", which computes fastest, and attention on ",
                            absl::StrJoin(layout.attention, ", "));
  return layout;
}

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& list, const kernels::cuda::CudaLibrary& library) {
  std::vector<std::string> names;
  if (list != "all") {
    names = absl::StrSplit(list, ',');
    return names;
  }
  int count = 0;
  DT_RETURN_IF_ERROR(library.Check(library->device_count(&count), "--gpus: counting them"));
  for (int i = 0; i < count; ++i) names.push_back(absl::StrCat("cuda:", i));
  if (names.empty()) return FailedPrecondition("--gpus all: this machine has no NVIDIA GPU");
  return names;
}

}  // namespace

absl::StatusOr<Layout> ChooseLayout(const std::string& asked, const std::vector<GpuOfMachine>& gpus) {
  const auto unlike =
      std::find_if(gpus.begin(), gpus.end(), [&](const GpuOfMachine& gpu) { return !Alike(gpus.front(), gpu); });
  if (asked == "split") {
    if (gpus.size() > 1) return SplitOver(gpus);
    return InvalidArgument("--layout split: ", gpus.front().name,
                           " alone would have layers and attention in two processes, which take turns there; name "
                           "another GPU in --gpus, or take --layout pairs");
  }
  if (unlike != gpus.end() && asked == "auto") return SplitOver(gpus);
  if (unlike != gpus.end())
    return InvalidArgument("--layout pairs: ", Text(*unlike), " is not like ", Text(gpus.front()),
                           ", and a request would get other tokens there; take GPUs of a kind, or --layout split");
  if (gpus.size() == 1) return PairsOn(gpus, "layers and attention on " + gpus.front().name + ", in one process");
  return PairsOn(gpus, absl::StrCat(gpus.size(),
                                    " GPUs are alike: each has layers, and attention of its own "
                                    "sequences. A split of them has at most half as many tokens a second"));
}

absl::StatusOr<std::vector<GpuOfMachine>> GpusOf(const std::string& list) {
  const auto library = kernels::cuda::CudaLibrary::Open();
  if (!library.ok()) return FailedPrecondition("--gpus: ", library.status().message());
  int driver = 0, runtime = 0;
  if ((**library)->versions(&driver, &runtime) != 0 || driver == 0)
    return FailedPrecondition("--gpus: this machine has no NVIDIA driver; leave --gpus out to use its CPU");
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(list, **library));
  std::vector<GpuOfMachine> gpus;
  for (const std::string& name : names) {
    const auto index = kernels::cuda::ParseCudaName(name);
    if (!index.ok())
      return InvalidArgument("--gpus: '", name, "' is not cuda:N, as in cuda:0,cuda:1; `dovetail devices` lists them");
    const auto is_it = [&](const GpuOfMachine& gpu) { return gpu.name == name; };
    if (std::any_of(gpus.begin(), gpus.end(), is_it)) return InvalidArgument("--gpus: ", name, " is there twice");
    GpuOfMachine& gpu = gpus.emplace_back();
    gpu.name = name;
    DT_RETURN_IF_ERROR(
        (*library)->Check((**library)->device_info(*index, &gpu.info), absl::StrCat("--gpus: looking at ", name)));
  }
  return gpus;
}

absl::StatusOr<bool> ApplyLayout(UpFlags& flags) {
  bool pairs = flags.layout == "pairs";
  if (!flags.gpus.empty()) {
    DT_ASSIGN_OR_RETURN(const std::vector<GpuOfMachine> gpus, GpusOf(flags.gpus));
    DT_ASSIGN_OR_RETURN(const Layout layout, ChooseLayout(flags.layout.empty() ? "auto" : flags.layout, gpus));
    LogInfo("--layout ", layout.pairs ? "pairs" : "split", ": ", layout.why);
    pairs = layout.pairs;
    flags.engine.compute_devices = absl::StrJoin(layout.layers, ",");
    flags.attention_devices = absl::StrJoin(layout.attention, ",");
    flags.engine.attention_workers = std::max<int>(1, static_cast<int>(layout.attention.size()));
  }
  if (pairs && flags.spares > 0)
    return InvalidArgument("--spares: they take the place of attention workers, which pairs have in their own ",
                           "processes; leave --spares out, or take --layout split");
  return pairs;
}

}  // namespace dovetail::cli
