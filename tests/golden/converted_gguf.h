#pragma once
#include <filesystem>
#include <string>

#include "model/formats/ggml_types.h"

namespace dovetail::test {

// What llama.cpp's converter makes of a Hugging Face folder of a hybrid or of a model with experts, as the bytes of a
// GGUF file with all weights in f32: its names (those of the PyPI package gguf), and what it does to the numbers.
// Written from the folder's tensors alone, without the readers that are tested. `arch` is general.architecture. Aborts
// if the folder is not of that kind.
//
// Keys that come from a latent (Kimi Linear) can be made twice as wide, whole blocks of 32, and stored in Q8_0, or in
// f32 with the values that Q8_0 keeps of them. `experts`: what those of layers are stored in, f32, Q8_0, Q4_0 or MXFP4,
// where their rows are whole blocks.
enum class LatentKeys { kAsTheyAre, kWideInQ8, kWideRoundedToQ8 };
std::string ConvertedGguf(const std::filesystem::path& folder, const std::string& arch,
                          LatentKeys keys = LatentKeys::kAsTheyAre, model::GgmlType experts = model::GgmlType::kF32);

}  // namespace dovetail::test
