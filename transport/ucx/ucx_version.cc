#include "transport/ucx/ucx_version.h"

#include <ucp/api/ucp.h>

#include "base/status.h"

namespace dovetail::transport::ucx {

absl::Status CheckUcxVersion(UcxVersion built, UcxVersion loaded) {
  if (built.major == loaded.major && built.minor <= loaded.minor) return absl::OkStatus();
  return FailedPrecondition("UCX: this program was built for version ", built.major, ".", built.minor, ", and libucp ",
                            loaded.major, ".", loaded.minor,
                            " was loaded; put the folder of the former's libraries into LD_LIBRARY_PATH, or install "
                            "that version");
}

absl::Status CheckLoadedUcx() {
  UcxVersion loaded;
  unsigned release = 0;
  ucp_get_version(&loaded.major, &loaded.minor, &release);
  return CheckUcxVersion({UCP_API_MAJOR, UCP_API_MINOR}, loaded);
}

}  // namespace dovetail::transport::ucx
