// What is read of a job before anything relies on it.
#pragma once
#include "interface.h"

// The tokens of requests, whose slots lie within the rows.
inline int check_tokens(const AttendJob &job) {
    if (job.tokens[0] < 0) return BAD_SPAN;
    for (int64_t r = 0; r < job.num_requests; r++)
        if (job.tokens[r + 1] < job.tokens[r]) return BAD_SPAN;
    const int64_t end = job.tokens[job.num_requests];
    const int64_t of_keys = job.keys.whole_rows(), rows = of_keys < job.values.num_rows ? of_keys : job.values.num_rows;
    if (!job.slots) return end > rows ? BAD_SPAN : DONE;
    if (end > job.num_slots) return BAD_SPAN;
    for (int64_t i = job.tokens[0]; i < end; i++)
        if (job.slots[i] < 0 || job.slots[i] >= rows) return BAD_SLOT;
    return DONE;
}

// The queries of requests, and the tokens that each reads.
inline int check_queries(const AttendJob &job) {
    if (job.queries[0] != 0 || job.queries[job.num_requests] > job.num_queries) return BAD_SPAN;
    for (int64_t r = 0; r < job.num_requests; r++) {
        const int64_t tokens = job.tokens[r + 1] - job.tokens[r];
        if (job.queries[r + 1] < job.queries[r]) return BAD_SPAN;
        for (int64_t i = job.queries[r]; i < job.queries[r + 1]; i++)
            if ((job.first && job.first[i] < 0) || (job.last && job.last[i] > tokens)) return BAD_SPAN;
    }
    return DONE;
}

// The request slots of a window, whose places lie within its copies.
inline int check_window(const Window &window, int64_t num_requests) {
    const int64_t places = window.num_request_slots * window.num_places;
    if (places > window.keys.num_rows || places > window.values.num_rows) return BAD_PLACES;
    for (int64_t r = 0; r < num_requests; r++)
        if (window.requests[r] < 0 || window.requests[r] >= window.num_request_slots) return BAD_REQUEST;
    return DONE;
}
