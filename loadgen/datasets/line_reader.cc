#include "loadgen/datasets/line_reader.h"

#include <isa-l/igzip_lib.h>

#include <filesystem>
#include <utility>
#include <vector>

namespace dovetail::loadgen {
namespace {

constexpr size_t kReadBytes = size_t{256} << 10;

}  // namespace

struct LineReader::Inflater {
  inflate_state state;
  std::vector<uint8_t> input = std::vector<uint8_t>(kReadBytes);
  std::vector<uint8_t> output = std::vector<uint8_t>(kReadBytes);
  bool in_member = true;  // a file may hold several, one after the other

  Inflater() { Begin(); }
  void Begin() {
    isal_inflate_init(&state);
    state.crc_flag = ISAL_GZIP;
    in_member = true;
  }
};

LineReader::LineReader(std::string path, std::ifstream file) : path_(std::move(path)), file_(std::move(file)) {}
LineReader::~LineReader() = default;

absl::StatusOr<std::unique_ptr<LineReader>> LineReader::Open(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return NotFound(path, ": there is no such file");
  if (!std::filesystem::is_regular_file(path, error)) return InvalidArgument(path, ": is not a file");
  std::ifstream file(path, std::ios::binary);
  if (!file) return InvalidArgument(path, ": cannot be read");
  char magic[2] = {};
  file.read(magic, sizeof magic);
  const bool gzip = file.gcount() == 2 && magic[0] == '\x1f' && magic[1] == '\x8b';
  file.clear();
  file.seekg(0);
  std::unique_ptr<LineReader> reader(new LineReader(path, std::move(file)));
  if (gzip) reader->inflater_ = std::make_unique<Inflater>();
  return reader;
}

absl::Status LineReader::Fill() {
  if (inflater_ == nullptr) {
    const size_t before = buffer_.size();
    buffer_.resize(before + kReadBytes);
    file_.read(buffer_.data() + before, kReadBytes);
    buffer_.resize(before + static_cast<size_t>(file_.gcount()));
    ended_ = file_.gcount() == 0;
    return absl::OkStatus();
  }
  inflate_state& state = inflater_->state;
  if (state.avail_in == 0) {
    file_.read(reinterpret_cast<char*>(inflater_->input.data()), kReadBytes);
    state.next_in = inflater_->input.data();
    state.avail_in = static_cast<uint32_t>(file_.gcount());
    if (state.avail_in == 0) {
      ended_ = true;
      return inflater_->in_member ? DataLoss(Place(), ": the gzip file ends too early") : absl::OkStatus();
    }
  }
  if (!inflater_->in_member) {
    uint8_t* const next = state.next_in;
    const uint32_t available = state.avail_in;
    inflater_->Begin();
    state.next_in = next;
    state.avail_in = available;
  }
  state.next_out = inflater_->output.data();
  state.avail_out = static_cast<uint32_t>(kReadBytes);
  if (const int error = isal_inflate(&state); error < 0)
    return DataLoss(Place(), ": the gzip data is damaged (ISA-L's error ", error, ")");
  buffer_.append(reinterpret_cast<const char*>(inflater_->output.data()), kReadBytes - state.avail_out);
  if (state.block_state == ISAL_BLOCK_FINISH) inflater_->in_member = false;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::string>> LineReader::Next() {
  size_t searched = at_;
  while (true) {
    const size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos || (ended_ && at_ < buffer_.size())) {
      const size_t stop = end == std::string::npos ? buffer_.size() : end;
      std::string line = buffer_.substr(at_, stop - at_);
      at_ = end == std::string::npos ? stop : stop + 1;
      if (!line.empty() && line.back() == '\r') line.pop_back();
      ++line_;
      return line;
    }
    if (ended_) return std::nullopt;
    if (buffer_.size() - at_ > kMaxLineBytes)
      return DataLoss(path_, ": line ", line_ + 1, " has more than ", kMaxLineBytes >> 20, " MiB");
    buffer_.erase(0, at_);
    at_ = 0;
    searched = buffer_.size();
    DT_RETURN_IF_ERROR(Fill());
  }
}

std::string LineReader::Place() const { return absl::StrCat(path_, ": line ", line_); }

}  // namespace dovetail::loadgen
