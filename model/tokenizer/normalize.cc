#include "model/tokenizer/normalize.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "model/tokenizer/utf8.h"

namespace dovetail::model {
namespace {

int CombiningClass(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

// Canonical ordering. utf8proc's own is a bubble sort: quadratic in a run of marks, which a user may make as long as he
// likes.
void SortMarks(std::vector<utf8proc_int32_t>& text) {
  auto run = text.begin();
  while (run != text.end()) {
    if (CombiningClass(*run) == 0) {
      ++run;
      continue;
    }
    auto end = std::find_if(run, text.end(), [](utf8proc_int32_t c) { return CombiningClass(c) == 0; });
    std::stable_sort(run, end, [](auto a, auto b) { return CombiningClass(a) < CombiningClass(b); });
    run = end;
  }
}

}  // namespace

// Every character below U+0300 is its own NFC and composes with nothing before it; the first mark is U+0300 (bytes CC
// 80).
bool SurelyNfc(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0xCC; });
}

absl::StatusOr<std::string> NormalizeNfc(std::string_view text) {
  if (SurelyNfc(text)) return std::string(text);
  std::vector<utf8proc_int32_t> points;
  points.reserve(text.size());
  while (!text.empty()) {
    const Utf8Step step = NextUtf8(text);
    utf8proc_int32_t decomposed[32];  // the longest canonical decomposition has 4
    int boundary = 0;
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code_point), decomposed, std::size(decomposed),
                                static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
    if (count < 0 || count > static_cast<utf8proc_ssize_t>(std::size(decomposed))) {
      return InvalidArgument("text cannot be normalised: ", utf8proc_errmsg(count));
    }
    points.insert(points.end(), decomposed, decomposed + count);
    text.remove_prefix(step.length);
  }
  SortMarks(points);
  const utf8proc_ssize_t length =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  if (length < 0) return InvalidArgument("text cannot be normalised: ", utf8proc_errmsg(length));
  std::string normalized;
  normalized.reserve(points.size());
  for (utf8proc_ssize_t i = 0; i < length; ++i) AppendUtf8(static_cast<char32_t>(points[i]), normalized);
  return normalized;
}

bool IsWordCharacter(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
  }
}

bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace dovetail::model
