// Functions that the stub of the CUDA runtime offers to the other stub libraries.
#pragma once

extern "C" {
// Writes one line to the log, in the format of printf.
void cuda_stub_log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Puts work on a stream: logs "EVENT s=STREAM [capture=ID] DETAILS", and adds a node where the stream is
// capturing. Returns a cudaError_t: nonzero where CUDA would refuse the work.
int cuda_stub_enqueue(void* stream, const char* event, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
}
