#pragma once

// Included before everything in each file of xgrammar (cmake/DovetailXgrammar.cmake), which cannot be told to stop:
// each loop that it enters looks whether compiling may go on, and an exception ends it (grammar_engine.cc).

#include <algorithm>
#include <any>
#include <array>
#include <atomic>
#include <bitset>
#include <cassert>
#include <cctype>
#include <charconv>
#include <chrono>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <functional>
#include <future>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <ostream>
#include <queue>
#include <random>
#include <regex>
#include <set>
#include <shared_mutex>
#include <sstream>
#include <stack>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

// Threads: thread-safe; each thread has a limit of its own.
void DovetailXgrammarTick();

// A loop within a loop: once for each round of the outer one. The empty branch keeps `else` where it belongs.
#define for                        \
  if (DovetailXgrammarTick(), 0) { \
  } else /* NOLINT */              \
    for
