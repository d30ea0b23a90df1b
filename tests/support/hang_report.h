#pragma once
#include <chrono>

namespace dovetail::test {

// A test that is still running after `limit` writes to stderr the functions that each of its threads is in, and ends
// with exit status 1. ctest alone would say only that it took too long.
//   Threads: once, before any other thread is started
void ReportHang(std::chrono::seconds limit);

}  // namespace dovetail::test
