#pragma once
#include <string>
#include <vector>

namespace dovetail::kernels::cuda {

// Where NVIDIA's libraries may lie: with the loader (an empty name), in CUDA's toolkit of major version `cuda_major`,
// in the system's folder, and in NVIDIA's Python wheels: of the active environment ($VIRTUAL_ENV, $CONDA_PREFIX), the
// user's and the system's. What exists of the latter, in that order. Reads the environment.
// Threads: thread-safe.
std::vector<std::string> LibraryFolders(const std::string& file, int cuda_major);

// Opens `file` from the first of them that has it; it stays open for the life of the process.
// Null: there is none, and `tried` says where it was looked for.
// Threads: thread-safe.
void* OpenLibrary(const std::string& file, int cuda_major, std::string& tried);

}  // namespace dovetail::kernels::cuda
