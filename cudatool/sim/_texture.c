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

static words texel(const struct texture *t, int64_t x, int64_t y, int64_t z, int layered) {
    words result = {0, 0, 0, 0};
    x = addressed(t, 0, x, t->width);
    y = addressed(t, 1, y, t->height);
    if (layered) z = z < 0 ? 0 : z >= t->depth ? t->depth - 1 : z;
    else z = addressed(t, 2, z, t->depth);
    if (x < 0 || y < 0 || z < 0) {
        for (int c = 0; c < t->channels; c++)
            result[c] = returns_float(t) ? bits_of(t->border[c]) : (uint32_t)(int32_t)t->border[c];
        return result;
    }
    const char *element = t->data + z * t->slice_bytes + y * t->row_bytes + x * t->channels * t->channel_bytes;
    for (int c = 0; c < t->channels; c++) result[c] = channel(t, element, c);
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

/* Fetch. `whole` says that the coordinates are integers, which are neither normalized nor filtered. */
words cudatool_texture(const struct texture *t, int geometry, int whole, int layer, double x, double y, double z) {
    int axes = axes_of(geometry), layered = geometry > VOLUME;
    if (geometry >= CUBE) layer = face(&x, &y, z) + 6 * (geometry == CUBE_LAYERS ? layer : 0);
    double px = scaled(t, x, t->width, whole), py = axes > 1 ? scaled(t, y, t->height, whole) : 0;
    double pz = axes > 2 ? scaled(t, z, t->depth, whole) : 0;
    int64_t slice = layered ? layer : (int64_t)floor(pz);
    if (whole || !t->linear || !returns_float(t)) return texel(t, floor(px), floor(py), slice, layered);
    px -= 0.5, py -= axes > 1 ? 0.5 : 0, pz -= axes > 2 ? 0.5 : 0;
    double wx = weight(px), wy = weight(py), wz = weight(pz), sum[4] = {0};
    for (int corner = 0; corner < 1 << axes; corner++) {
        int dx = corner & 1, dy = corner >> 1 & 1, dz = corner >> 2;
        double share = (dx ? wx : 1 - wx) * (axes < 2 ? 1 : dy ? wy : 1 - wy) * (axes < 3 ? 1 : dz ? wz : 1 - wz);
        int64_t iz = layered ? slice : (int64_t)floor(pz) + dz;
        words found = texel(t, (int64_t)floor(px) + dx, (int64_t)floor(py) + dy, iz, layered);
        if (share == 0) continue; /* what is not weighed must not spread NaN */
        for (int c = 0; c < t->channels; c++) {
            float value;
            uint32_t bits = found[c];
            memcpy(&value, &bits, 4);
            sum[c] += share * value;
        }
    }
    words result = {0, 0, 0, 0};
    for (int c = 0; c < t->channels; c++) result[c] = bits_of((float)sum[c]);
    return result;
}

/* Fetch from a level of detail. A texture without mipmaps has one only. */
words cudatool_texture_level(const struct texture *t, int geometry, int whole, int layer, double x, double y, double z,
                             double level) {
    if (!t->levels || !t->data) return cudatool_texture(t, geometry, whole, layer, x, y, z);
    level = isnan(level) ? 0 : level;
    if (!whole) level = fmin(fmax(level + t->bias, t->least), t->most);
    level = fmin(fmax(level, 0), t->levels - 1);
    int lower = (int)floor(level);
    double share = weight(level);
    if (whole || !t->blends) return cudatool_texture(t + (int)floor(level + 0.5), geometry, whole, layer, x, y, z);
    words result = cudatool_texture(t + lower, geometry, whole, layer, x, y, z);
    if (share == 0 || lower + 1 >= t->levels) return result;
    words upper = cudatool_texture(t + lower + 1, geometry, whole, layer, x, y, z);
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
    int layered = geometry > VOLUME;
    if (geometry >= CUBE) layer = face(&x, &y, z) + 6 * (geometry == CUBE_LAYERS ? layer : 0);
    int64_t i = floor(scaled(t, x, t->width, 0) - 0.5), j = floor(scaled(t, y, t->height, 0) - 0.5);
    words result = {texel(t, i, j + 1, layer, layered)[component], texel(t, i + 1, j + 1, layer, layered)[component],
                    texel(t, i + 1, j, layer, layered)[component], texel(t, i, j, layer, layered)[component]};
    return result;
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
