#pragma once
#include <cstddef>
#include <string>
#include <string_view>

// Code points of valid UTF-8, with Python's idea of white space, case and printability. Offsets are bytes.
// Threads: pure.

namespace dovetail::model::jinja {

bool IsValidUtf8(std::string_view bytes);

// Bytes of the code point that starts with `lead`. 1 for a stray continuation byte, so that scanning always advances.
size_t CodePointBytes(unsigned char lead);
// The code point at `offset`, which must be inside; advances `offset` past it. U+FFFD where the bytes are broken.
char32_t DecodeAt(std::string_view bytes, size_t& offset);
// The start of the code point before `offset` > 0.
size_t PreviousOffset(std::string_view bytes, size_t offset);
void AppendUtf8(char32_t code_point, std::string& out);

size_t CountCodePoints(std::string_view bytes);
// The byte offset of the `index`-th code point; the size when there are fewer.
size_t OffsetOfCodePoint(std::string_view bytes, size_t index);

// Like string_view::find, but in linear time whatever the texts are.
size_t FindBytes(std::string_view text, std::string_view what, size_t from = 0);
size_t FindLastBytes(std::string_view text, std::string_view what);

bool IsSpace(char32_t c);
bool IsAlpha(char32_t c);
bool IsDigit(char32_t c);
bool IsUpper(char32_t c);
bool IsLower(char32_t c);
bool IsPrintable(char32_t c);

std::string ToUpper(std::string_view bytes);
std::string ToLower(std::string_view bytes);

}  // namespace dovetail::model::jinja
