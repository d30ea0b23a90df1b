#include <cstddef>
#include <cstdint>

#include "tests/fuzz/targets.h"

// libFuzzer's entry; the build defines DOVETAIL_FUZZ_TARGET as one function of targets.h.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dovetail::fuzz::DOVETAIL_FUZZ_TARGET(data, size);
  return 0;
}
