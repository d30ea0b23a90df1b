#pragma once
#include <filesystem>
#include <string>

namespace dovetail::test {

// What llama.cpp's converter makes of a Hugging Face folder of a hybrid or of a model with experts, as the bytes of a
// GGUF file with all weights in f32: its names (those of the PyPI package gguf), and what it does to the numbers.
// Written from the folder's tensors alone, without the readers that are tested. `arch` is general.architecture. Aborts
// if the folder is not of that kind.
std::string ConvertedGguf(const std::filesystem::path& folder, const std::string& arch);

}  // namespace dovetail::test
