/* Fetching from textures, and where a surface's elements lie: what kernels call for tex, tld4, suld and sust.
 *
 * Semantics: CUDA C++ Programming Guide, "Texture Fetching", and PTX ISA, 9.7.10 and 9.7.11.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t words __attribute__((vector_size(16)));

enum { WRAP, CLAMP, MIRROR, BORDER }; /* CUaddress_mode */
enum { UNSIGNED, SIGNED, FLOATING };
enum { LINE, PLANE, VOLUME, LINE_LAYERS, PLANE_LAYERS, CUBE, CUBE_LAYERS };

/* What a texture or surface object's handle points to; cudatool/sim/textures.py has the same fields. */
struct texture {
    const char *data;
    uint64_t row_bytes, slice_bytes;
    int32_t width, height, depth; /* depth counts layers and faces, too */
    int32_t channels, channel_bytes, kind;
    int32_t as_integer, normalized, linear, srgb;
    int32_t mode[3];
    float border[4];
    int32_t levels; /* of a mipmapped array: as many structures follow each other, one for each level; 0 for others */
    int32_t blends; /* whether values of two levels are blended, if the level lies between them */
    float bias, least, most;
};

static float half_value(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? ldexpf((float)(fraction + 1024), exponent - 25)
                                     : ldexpf((float)fraction, -24);
    return half >> 15 ? -magnitude : magnitude;
}

static int returns_float(const struct texture *t) { return t->kind == FLOATING || !t->as_integer; }

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* Read channel `c` of an element: its bits as a 32-bit integer, or the float that it stands for. */
static uint32_t channel(const struct texture *t, const char *element, int c) {
    uint32_t raw = 0;
    memcpy(&raw, element + c * t->channel_bytes, t->channel_bytes);
    int bits = 8 * t->channel_bytes;
    if (t->kind == FLOATING) return t->channel_bytes == 2 ? bits_of(half_value((uint16_t)raw)) : raw;
    int32_t sign_extended = (int32_t)(raw << (32 - bits)) >> (32 - bits);
    if (t->as_integer) return t->kind == SIGNED ? (uint32_t)sign_extended : raw;
    if (t->kind == SIGNED) return bits_of(fmaxf((float)sign_extended / (float)((1u << (bits - 1)) - 1), -1.0f));
    float value = (float)raw / (float)(bits == 8 ? 255 : 65535);
    if (t->srgb && c < 3) value = value <= 0.04045f ? value / 12.92f : powf((value + 0.055f) / 1.055f, 2.4f);
    return bits_of(value);
}

/* Return the index that the address mode makes of `i`, or -1 for the border. */
static int64_t addressed(const struct texture *t, int axis, int64_t i, int64_t size) {
    if (i >= 0 && i < size) return i;
    int mode = t->mode[axis];
    if (!t->normalized && (mode == WRAP || mode == MIRROR)) mode = CLAMP; /* these need normalized coordinates */
    if (mode == BORDER) return -1;
    if (mode == CLAMP) return i < 0 ? 0 : size - 1;
    int64_t period = mode == WRAP ? size : 2 * size;
    int64_t place = ((i % period) + period) % period;
    return place < size ? place : period - 1 - place;
}

/* Return where a texel is, NULL for the border. */
static const char *element(const struct texture *t, int64_t x, int64_t y, int64_t z, int layered) {
    x = addressed(t, 0, x, t->width);
    y = addressed(t, 1, y, t->height);
    if (layered) z = z < 0 ? 0 : z >= t->depth ? t->depth - 1 : z;
    else z = addressed(t, 2, z, t->depth);
    if (x < 0 || y < 0 || z < 0) return NULL;
    return t->data + z * t->slice_bytes + y * t->row_bytes + x * t->channels * t->channel_bytes;
}

static words texel(const struct texture *t, const char *element) {
    words result = {0, 0, 0, 0};
    for (int c = 0; c < t->channels; c++)
        result[c] = element           ? channel(t, element, c)
                    : returns_float(t) ? bits_of(t->border[c])
                                       : (uint32_t)(int32_t)t->border[c];
    return result;
}

/* Turn a direction into a face of a cube and a place on it, in [0, 1]. */
static int face(double *x, double *y, double z) {
    double ax = fabs(*x), ay = fabs(*y), az = fabs(z), s, r, m;
    int number;
    if (ax >= ay && ax >= az) {
        number = *x < 0, m = ax, s = *x < 0 ? z : -z, r = -*y;
    } else if (ay >= az) {
        number = 2 + (*y < 0), m = ay, s = *x, r = *y < 0 ? -z : z;
    } else {
        number = 4 + (z < 0), m = az, s = z < 0 ? -*x : *x, r = -*y;
    }
    *x = (s / m + 1) / 2;
    *y = (r / m + 1) / 2;
    return number;
}

static double scaled(const struct texture *t, double coordinate, int size, int whole) {
    if (isnan(coordinate)) coordinate = 0;
    double place = t->normalized && !whole ? coordinate * size : coordinate;
    return fmin(fmax(place, -1e9), 1e9);
}

/* The fraction of a place between two texels, which GPUs keep in 8 bits. */
static double weight(double place) { return floor((place - floor(place)) * 256 + 0.5) / 256; }

static int axes_of(int geometry) {
    return geometry == LINE || geometry == LINE_LAYERS ? 1 : geometry == VOLUME ? 3 : 2;
}

enum { PLACE, WHOLE, GATHER }; /* fetch at a place; at integers, neither normalized nor filtered; take four texels */

struct corner {
    const char *element; /* NULL: the border */
    double share;
};

/* List the texels that a fetch looks at, with the share of each in the result; return how many there are. */
static int corners(const struct texture *t, int geometry, int how, int layer, double x, double y, double z,
                   struct corner *list) {
    int axes = axes_of(geometry), layered = geometry > VOLUME, whole = how == WHOLE;
    if (geometry >= CUBE) layer = face(&x, &y, z) + 6 * (geometry == CUBE_LAYERS ? layer : 0);
    double px = scaled(t, x, t->width, whole), py = axes > 1 ? scaled(t, y, t->height, whole) : 0;
    double pz = axes > 2 ? scaled(t, z, t->depth, whole) : 0;
    int64_t slice = layered ? layer : (int64_t)floor(pz);
    if (how == GATHER) {
        static const int order[4][2] = {{0, 1}, {1, 1}, {1, 0}, {0, 0}};
        int64_t i = floor(px - 0.5), j = floor(py - 0.5);
        for (int n = 0; n < 4; n++)
            list[n] = (struct corner){element(t, i + order[n][0], j + order[n][1], layer, layered), 1};
        return 4;
    }
    if (whole || !t->linear || !returns_float(t)) {
        list[0] = (struct corner){element(t, floor(px), floor(py), slice, layered), 1};
        return 1;
    }
    px -= 0.5, py -= axes > 1 ? 0.5 : 0, pz -= axes > 2 ? 0.5 : 0;
    double wx = weight(px), wy = weight(py), wz = weight(pz);
    int count = 0;
    for (int corner = 0; corner < 1 << axes; corner++) {
        int dx = corner & 1, dy = corner >> 1 & 1, dz = corner >> 2;
        double share = (dx ? wx : 1 - wx) * (axes < 2 ? 1 : dy ? wy : 1 - wy) * (axes < 3 ? 1 : dz ? wz : 1 - wz);
        if (share == 0) continue; /* what is not weighed must not spread NaN */
        int64_t iz = layered ? slice : (int64_t)floor(pz) + dz;
        list[count++] = (struct corner){element(t, (int64_t)floor(px) + dx, (int64_t)floor(py) + dy, iz, layered), share};
    }
    return count;
}

static words fetched(const struct texture *t, int geometry, int how, int layer, double x, double y, double z) {
    struct corner list[8];
    int count = corners(t, geometry, how, layer, x, y, z, list);
    if (count == 1) return texel(t, list[0].element);
    double sum[4] = {0};
    for (int n = 0; n < count; n++) {
        words found = texel(t, list[n].element);
        for (int c = 0; c < t->channels; c++) {
            float value;
            uint32_t bits = found[c];
            memcpy(&value, &bits, 4);
            sum[c] += list[n].share * value;
        }
    }
    words result = {0, 0, 0, 0};
    for (int c = 0; c < t->channels; c++) result[c] = bits_of((float)sum[c]);
    return result;
}

/* Choose the levels of detail that a fetch looks at, one or two; return the share of the second. A texture without
 * mipmaps has one only. */
static double chosen_levels(const struct texture *t, int how, double level, const struct texture *list[2]) {
    list[0] = t, list[1] = NULL;
    if (how == GATHER || !t->levels || !t->data) return 0;
    level = isnan(level) ? 0 : level;
    if (how != WHOLE) level = fmin(fmax(level + t->bias, t->least), t->most);
    level = fmin(fmax(level, 0), t->levels - 1);
    if (how == WHOLE || !t->blends) {
        list[0] = t + (int)floor(level + 0.5);
        return 0;
    }
    int lower = (int)floor(level);
    double share = weight(level);
    list[0] = t + lower;
    if (share != 0 && lower + 1 < t->levels) list[1] = t + lower + 1;
    return share;
}

/* Fetch. */
words cudatool_texture_level(const struct texture *t, int geometry, int how, int layer, double x, double y, double z,
                             double level) {
    const struct texture *list[2];
    double share = chosen_levels(t, how, level, list);
    words result = fetched(list[0], geometry, how, layer, x, y, z);
    if (!list[1]) return result;
    words upper = fetched(list[1], geometry, how, layer, x, y, z);
    for (int c = 0; c < t->channels; c++) {
        uint32_t ends[2] = {result[c], upper[c]};
        float values[2];
        memcpy(values, ends, sizeof values);
        result[c] = bits_of((float)((1 - share) * values[0] + share * values[1]));
    }
    return result;
}

/* Return the level of detail whose texels are as far apart as places where the coordinates change so much. */
double cudatool_texture_gradient(const struct texture *t, int geometry, double xx, double xy, double xz, double yx,
                                 double yy, double yz) {
    int axes = axes_of(geometry);
    double w = t->width, h = axes > 1 ? t->height : 0, d = axes > 2 ? t->depth : 0;
    double one = sqrt(xx * w * xx * w + xy * h * xy * h + xz * d * xz * d);
    double other = sqrt(yx * w * yx * w + yy * h * yy * h + yz * d * yz * d);
    return log2(fmax(one, other));
}

/* Gather one channel of the four texels that a linear filter would look at. */
words cudatool_gather(const struct texture *t, int geometry, int component, int layer, double x, double y, double z) {
    struct corner list[4];
    corners(t, geometry, GATHER, layer, x, y, z, list);
    words result = {0, 0, 0, 0};
    for (int n = 0; n < 4; n++) result[n] = texel(t, list[n].element)[component];
    return result;
}

/* Say what a fetch reads: fill in the addresses of pieces of 1, 2 or 4 bytes, at most 64, and return 8 times their
 * number plus their size. For the checkers and for footprints. */
uint32_t cudatool_texels(const struct texture *t, int geometry, int how, int layer, double x, double y, double z,
                         double level, uint64_t *places) {
    const struct texture *levels[2];
    chosen_levels(t, how, level, levels);
    int bytes = t->channels * t->channel_bytes;
    uint32_t piece = bytes < 4 ? bytes : 4, number = 0;
    for (int one = 0; one < 2 && levels[one]; one++) {
        struct corner list[8];
        int count = corners(levels[one], geometry, how, layer, x, y, z, list);
        for (int n = 0; n < count; n++)
            for (int at = 0; list[n].element && at < bytes; at += piece)
                places[number++] = (uint64_t)list[n].element + at;
    }
    return number * 8 + piece;
}

enum { TRAP, TO_EDGE, ZERO }; /* what an access outside of a surface does */
enum { NOWHERE = 0, FORBIDDEN = 1 };

/* Return where `size` bytes of a surface are, `x` in bytes; NOWHERE if they are to be ignored, FORBIDDEN to trap. */
uint64_t cudatool_surface(const struct texture *t, int geometry, int outside, int size, int layer, int x, int y, int z) {
    int axes = axes_of(geometry);
    int64_t row = (int64_t)t->width * t->channels * t->channel_bytes;
    int64_t place[3] = {x, axes > 1 ? y : 0, geometry > VOLUME ? layer : axes > 2 ? z : 0};
    int64_t last[3] = {row - size, t->height - 1, t->depth - 1};
    for (int axis = 0; axis < 3; axis++) {
        if (place[axis] >= 0 && place[axis] <= last[axis]) continue;
        if (outside != TO_EDGE) return outside == TRAP ? FORBIDDEN : NOWHERE;
        place[axis] = place[axis] < 0 ? 0 : last[axis];
    }
    if (place[0] % size) return FORBIDDEN;
    return (uint64_t)t->data + place[2] * t->slice_bytes + place[1] * t->row_bytes + place[0];
}
