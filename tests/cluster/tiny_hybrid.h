#pragma once
#include <filesystem>
#include <string>

namespace dovetail::test {

// A random model of any architecture that Hugging Face folders are read of, as such a folder: `config` is the text of
// its config.json, and every tensor that the config asks for is there, in f32. The same config and seed give the same
// files.
std::filesystem::path WriteTinyFolder(const std::string& config, uint64_t seed, const std::filesystem::path& folder);

// Gated DeltaNet with its convolution, then gated softmax attention, by turns.
std::string TinyGatedDeltaConfig();
// Lightning attention and softmax attention by turns, with four experts.
std::string TinyLightningConfig();
// Mamba-2 only: no KV at all.
std::string TinyMamba2Config();

}  // namespace dovetail::test
