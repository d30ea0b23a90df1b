#include "server/openai/answers/argument_reader.h"
#include "server/openai/answers/json_extent.h"

namespace dovetail::server {
namespace {

class JsonArguments : public ArgumentReader {
 public:
  size_t Read(std::string_view text, bool, std::string& json) override {
    const size_t read = extent_.Read(text);
    json += text.substr(0, read);
    done_ = extent_.done();
    return read;
  }

 private:
  JsonExtent extent_;
};

}  // namespace

std::unique_ptr<ArgumentReader> MakeJsonArguments() { return std::make_unique<JsonArguments>(); }

}  // namespace dovetail::server
