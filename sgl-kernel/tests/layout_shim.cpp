// The host side of layout.cuh for a machine without nvcc.
#include "layout.cuh"

extern "C" {
void shim_layout(const afd::Shape* shape, afd::Layout* layout) { *layout = afd::make_layout(*shape); }
uint32_t shim_share(uint32_t block, uint32_t blocks) { return afd::share(block, blocks); }
int shim_reached(uint32_t seen, uint32_t expected) { return afd::reached(seen, expected); }
int shim_owner_of(const afd::Shape* shape, int expert) { return afd::owner_of(*shape, expert); }
int shim_first_expert(const afd::Shape* shape, int rank) { return afd::first_expert(*shape, rank); }
}
