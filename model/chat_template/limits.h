#pragma once
#include <cstddef>

namespace dovetail::model {

// What one chat template may use. A template comes with a model file and is untrusted: every loop, string, list and
// recursion is bounded, so that no template runs longer than about 100 ms or holds more than some ten MiB beyond its
// input.
//
// A step is one evaluated node of the template, one element visited, or 64 bytes of string written or searched.
// Threads: thread-compatible; a value.
struct TemplateLimits {
  // Parsing.
  size_t source_bytes = 256 * 1024;
  int nesting = 32;  // brackets, operators and blocks inside one another, postfix links in a row

  // Rendering. The step budget grows with the conversation, since honest templates visit every message several times.
  size_t steps = 10'000;
  size_t steps_per_message = 2'000;
  size_t steps_per_json_value = 50;
  size_t input_bytes_per_step = 4;
  size_t steps_max = 1'000'000;
  size_t output_bytes = 1024 * 1024;  // plus the size of the input; also the bound of every single string
  size_t list_items = 100'000;
  size_t range_items = 100'000;
  int macro_depth = 32;
  int evaluation_depth = 600;  // frames of the interpreter, over all macros
  int value_depth = 64;        // containers inside one another, in the input too

  // Jinja's sandbox, which the reference renders with, refuses list.append and its like. true allows them.
  bool allow_list_mutation = false;
};

}  // namespace dovetail::model
