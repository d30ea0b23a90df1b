#include "server/cli/terminal.h"

#include <histedit.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cwchar>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/thread_name.h"

namespace dovetail::cli {
namespace {

constexpr int kMostHistory = 1000;  // lines

int interrupt_fd = -1;  // of the one Interrupts; written by a signal handler, which has nothing else

void Write(int event_fd, uint64_t count) {
  [[maybe_unused]] const ssize_t written = write(event_fd, &count, sizeof(count));
}

void OnInterrupt(int) { Write(interrupt_fd, 1); }

}  // namespace

bool ShowsColours(int descriptor) {
  const char* const none = std::getenv("NO_COLOR");
  const char* const terminal = std::getenv("TERM");
  if (none != nullptr && *none != '\0') return false;
  return isatty(descriptor) == 1 && terminal != nullptr && std::string(terminal) != "dumb";
}

std::string Coloured(const std::string& text, const char* colour, bool colours) {
  return colours ? absl::StrCat("\x1b[", colour, "m", text, "\x1b[0m") : text;
}

// What libedit needs; it calls back with itself, whose client data this is.
struct LineEditor::Library {
  explicit Library(int when_raised) : raised_fd(when_raised) {
    DT_CHECK(editor != nullptr && history != nullptr);
    HistEvent event;
    ::history(history, &event, H_SETSIZE, kMostHistory);
    el_set(editor, EL_CLIENTDATA, this);
    el_set(editor, EL_EDITOR, "emacs");
    el_set(editor, EL_SIGNAL, 1);  // it redraws the line after Ctrl-Z and when the window has another size
    el_set(editor, EL_HIST, ::history, history);
    el_set(
        editor, EL_PROMPT, +[](EditLine* from) { return Of(from).prompt.data(); });
    el_set(
        editor, EL_GETCFN, +[](EditLine* from, wchar_t* character) { return Of(from).ReadCharacter(character); });
  }
  ~Library() {
    el_end(editor);
    history_end(history);
  }

  static Library& Of(EditLine* editor) {
    void* library = nullptr;
    el_get(editor, EL_CLIENTDATA, &library);
    return *static_cast<Library*>(library);
  }

  // False: a Ctrl-C was raised. A signal alone would not end a read() that begins after it.
  bool AwaitInput() const {
    std::array<pollfd, 2> ready{pollfd{STDIN_FILENO, POLLIN, 0}, pollfd{raised_fd, POLLIN, 0}};
    while (poll(ready.data(), ready.size(), -1) < 0)
      if (errno != EINTR) return false;
    return ready[1].revents == 0;
  }

  // A Ctrl-D was typed since the last line, while no line was edited: there is input, and no byte of it.
  static bool EndWasTyped() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    int bytes = 0;
    return poll(&input, 1, 0) == 1 && (input.revents & POLLIN) != 0 && ioctl(STDIN_FILENO, FIONREAD, &bytes) == 0 &&
           bytes == 0;
  }

  // As EL_GETCFN wants it: 1 and a character, 0 at the end of input, -1 to end the line.
  int ReadCharacter(wchar_t* character) const {
    std::mbstate_t state{};
    while (true) {
      char byte = 0;
      if (!AwaitInput()) return -1;
      const ssize_t got = read(STDIN_FILENO, &byte, 1);
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (got <= 0) return static_cast<int>(got);
      const size_t length = std::mbrtowc(character, &byte, 1, &state);
      if (length == size_t(-2)) continue;  // more of its bytes come
      // A Ctrl-D from before the line was edited comes as NUL, which libedit would keep in the line: left out.
      if (length == 0) continue;
      if (length != size_t(-1)) return 1;
      state = {};  // no UTF-8: left out
    }
  }

  const int raised_fd;
  EditLine* const editor = el_init("dovetail", stdin, stdout, stderr);
  History* const history = history_init();
  std::string prompt;
};

LineEditor::LineEditor(const Interrupts& interrupts)
    : library_((std::setlocale(LC_CTYPE, "C.UTF-8"),  // characters of several bytes are edited as one
                std::make_unique<Library>(interrupts.raised_fd()))) {}

LineEditor::~LineEditor() = default;

std::optional<std::string> LineEditor::Read(const std::string& prompt) {
  if (Library::EndWasTyped()) return std::nullopt;
  library_->prompt = prompt;
  int length = 0;
  const char* const line = el_gets(library_->editor, &length);
  if (line == nullptr || length <= 0) return std::nullopt;
  std::string read(line, static_cast<size_t>(length));
  if (read.back() == '\n') read.pop_back();
  return read;
}

void LineEditor::Remember(const std::string& line) {
  HistEvent event;
  history(library_->history, &event, H_ENTER, line.c_str());
}

Interrupts::Interrupts() : raised_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  interrupt_fd = eventfd(0, EFD_CLOEXEC);
  DT_CHECK(interrupt_fd >= 0 && raised_fd_ >= 0);
  watcher_ = std::thread([this] {
    NameThread("dt-interrupts");
    while (true) {
      uint64_t count = 0;
      const ssize_t got = read(interrupt_fd, &count, sizeof(count));
      if (got < 0 && errno == EINTR) continue;  // the signal may come to this thread
      if (got != sizeof(count)) return;
      MutexLock lock(mutex_);
      if (count >= uint64_t{1} << 32) return;  // the destructor's
      Write(raised_fd_, 1);
      if (action_) action_();
    }
  });
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  sigaction(SIGINT, &action, nullptr);
}

Interrupts::~Interrupts() {
  std::signal(SIGINT, SIG_DFL);
  Write(interrupt_fd, uint64_t{1} << 32);
  watcher_.join();
  close(std::exchange(interrupt_fd, -1));
  close(raised_fd_);
}

bool Interrupts::TakeRaised() {
  uint64_t count = 0;
  return read(raised_fd_, &count, sizeof(count)) == sizeof(count);
}

void Interrupts::SetAction(std::function<void()> action) {
  MutexLock lock(mutex_);
  action_ = std::move(action);
  if (action_ && TakeRaised()) action_();
}

}  // namespace dovetail::cli
