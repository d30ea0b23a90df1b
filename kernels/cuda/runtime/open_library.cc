#include "kernels/cuda/runtime/open_library.h"

#include <dlfcn.h>
#include <glob.h>

#include <cstdlib>

namespace dovetail::kernels::cuda {

std::vector<std::string> LibraryFolders(const std::string& file, int cuda_major) {
  std::vector<std::string> folders = {"", "/usr/local/cuda/lib64/",
                                      "/usr/local/cuda-" + std::to_string(cuda_major) + "/lib64/",
                                      "/usr/lib/x86_64-linux-gnu/"};
  std::vector<std::string> prefixes;
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX", "HOME"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    prefixes.push_back(std::string(value) + (std::string(name) == "HOME" ? "/.local" : ""));
  }
  prefixes.insert(prefixes.end(), {"/usr/local", "/usr"});
  for (const std::string& prefix : prefixes) {
    for (const char* packages : {"site-packages", "dist-packages"}) {
      for (const char* python : {"python3", "python3.*"}) {
        glob_t found{};
        const std::string pattern = prefix + "/lib/" + python + "/" + packages + "/nvidia/*/lib/" + file;
        if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
          for (size_t i = 0; i < found.gl_pathc; ++i) {
            const std::string path = found.gl_pathv[i];
            folders.push_back(path.substr(0, path.size() - file.size()));
          }
        }
        globfree(&found);
      }
    }
  }
  return folders;
}

void* OpenLibrary(const std::string& file, int cuda_major, std::string& tried) {
  for (const std::string& folder : LibraryFolders(file, cuda_major)) {
    if (void* const library = dlopen((folder + file).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += (tried.empty() ? "" : ", ") + folder + file;
  }
  tried += ", and NVIDIA's Python wheels";
  return nullptr;
}

}  // namespace dovetail::kernels::cuda
