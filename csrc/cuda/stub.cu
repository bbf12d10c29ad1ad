#include "cuda/device.cuh"
namespace fastlin { namespace cuda {
int launch_form(const Work&, bool, void*) { return 1; }
int launch_form_drawn(const Work&, bool, void*) { return 1; }
}}
