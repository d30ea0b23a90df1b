#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "server/openai/json.h"

namespace dovetail::server {

// Turns the arguments of one call, as a model writes them, into the text of a JSON object, piece by piece.
// Threads: thread-compatible.
class ArgumentReader {
 public:
  virtual ~ArgumentReader() = default;
  // Appends to `json` what the beginning of `text` gives, and returns how much of it was read; the rest comes again,
  // with more behind it. `last`: nothing follows, so that all is read.
  virtual size_t Read(std::string_view text, bool last, std::string& json) = 0;
  bool done() const { return done_; }  // their end was read, or something that arguments cannot be

 protected:
  bool done_ = false;
};

// A JSON object, as it stands.
std::unique_ptr<ArgumentReader> MakeJsonArguments();

struct XmlArgumentMarks {
  std::string_view begin, name_end, value_end, end;  // "<parameter=", ">", "</parameter>", "</function>"
};
// Parameters as elements, each with its value as text. `schema` says which values are strings; one without a type is
// what its text is as JSON, or a string.
std::unique_ptr<ArgumentReader> MakeXmlArguments(const XmlArgumentMarks& marks, const Json& schema);

// What stands between the brackets of a call in Python: name=literal, or **{...}; the closing bracket included.
// Literals may be spelled as in JSON, too.
std::unique_ptr<ArgumentReader> MakePythonArguments();

}  // namespace dovetail::server
