// The operations on all pages of a prefix that every request needs, on the tree's own Python objects (radix/node.py).
//
// A request of 4,096 tokens visits 256 pages a dozen times. In Python each visit is a few bytecodes; here it is a few
// loads, and what remains is the cost of fetching the objects from memory once. cache_pools.py, eviction.py, allocate.py
// and tree.py do the same in Python where this cannot be built; the tests run both.
//
// Called with the interpreter lock held (ctypes.PyDLL). A function that fails sets an exception and returns NULL.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <cstring>

#define FB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Offsets of __slots__ in an object.
Py_ssize_t node_lock_ref, node_device, node_host, node_hits;
Py_ssize_t copy_prev, copy_next, copy_page, copy_arriving, copy_since;

Py_ssize_t offset_of(PyObject* type, const char* name) {
    PyObject* descriptor = PyObject_GetAttrString(type, name);
    if (descriptor == nullptr) return -1;
    Py_ssize_t offset = -1;
    if (Py_TYPE(descriptor) == &PyMemberDescr_Type)
        offset = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s is not a slot", name);
    Py_DECREF(descriptor);
    return offset;
}

PyObject*& field(PyObject* object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}
// A slot that was never set is NULL; NULL and None both mean "nothing".
PyObject* get(PyObject* object, Py_ssize_t offset) {
    PyObject* value = field(object, offset);
    return value == Py_None ? nullptr : value;
}
void set(PyObject* object, Py_ssize_t offset, PyObject* value) {
    PyObject* old = field(object, offset);
    Py_INCREF(value);
    field(object, offset) = value;
    Py_XDECREF(old);
}

// Prefetches an object's first `lines` cache lines. Inlined, because GCC 12 removes calls of a function that does only this.
__attribute__((always_inline)) inline void fetch(PyObject* object, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(reinterpret_cast<const char*>(object) + 64 * i, 1);
}

long number(PyObject* object, Py_ssize_t offset) { return PyLong_AsLong(field(object, offset)); }
// Adds to a slot; returns the new value.
long add(PyObject* object, Py_ssize_t offset, long more) {
    const long value = number(object, offset) + more;
    PyObject* boxed = PyLong_FromLong(value);
    PyObject* old = field(object, offset);
    field(object, offset) = boxed;
    Py_XDECREF(old);
    return value;
}

// The linked list of eviction.py: a ring through a sentinel.
void unlink(PyObject* copy) {
    PyObject *before = field(copy, copy_prev), *after = field(copy, copy_next);
    set(before, copy_next, after);
    set(after, copy_prev, before);
    set(copy, copy_prev, Py_None);
}
void append(PyObject* head, PyObject* copy) {
    PyObject* last = field(head, copy_prev);
    set(copy, copy_prev, last);
    set(copy, copy_next, head);
    set(last, copy_next, copy);
    set(head, copy_prev, copy);
}

// Unlinks a slot's copy in a tier if it is in the queue; returns 1 if it was.
long take_from_queue(PyObject* slot, Py_ssize_t tier) {
    PyObject* copy = get(slot, tier);
    if (copy == nullptr || get(copy, copy_prev) == nullptr) return 0;
    unlink(copy);
    return 1;
}

// Appends a slot's copy in a tier, unless it is still arriving; returns 1 if it did.
long put_into_queue(PyObject* slot, Py_ssize_t tier, PyObject* head, PyObject* now) {
    PyObject* copy = get(slot, tier);
    if (copy == nullptr || get(copy, copy_arriving) != nullptr) return 0;
    set(copy, copy_since, now);
    append(head, copy);
    return 1;
}

}  // namespace

// Node and CachedPage are the classes of node.py; returns None.
FB_EXPORT PyObject* fb_radix_init(PyObject* Node, PyObject* CachedPage) {
    const struct {
        Py_ssize_t* offset;
        PyObject* type;
        const char* name;
    } wanted[] = {{&node_lock_ref, Node, "lock_ref"},           {&node_device, Node, "device"}, {&node_host, Node, "host"},
                  {&node_hits, Node, "hits"},           {&copy_prev, CachedPage, "prev"},     {&copy_next, CachedPage, "next"},
                  {&copy_page, CachedPage, "page"},           {&copy_arriving, CachedPage, "arriving"},
                  {&copy_since, CachedPage, "since"}};
    for (const auto& one : wanted)
        if ((*one.offset = offset_of(one.type, one.name)) < 0) return nullptr;
    Py_RETURN_NONE;
}

// How many whole steps of `step` bytes `one` (bytearray) and `other` (bytes, from `start` on) have in common. Those pages (the
// first of `nodes`, a list) are visited next: their objects are prefetched here, all at once instead of one by one.
FB_EXPORT PyObject* fb_radix_common_prefix_len(PyObject* one, PyObject* other, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t step,
                                   PyObject* nodes) {
    const char* a = PyByteArray_AS_STRING(one);
    const char* b = PyBytes_AS_STRING(other) + start;
    const Py_ssize_t size = PyByteArray_GET_SIZE(one), length = size < stop - start ? size : stop - start;
    Py_ssize_t same = 0;
    while (same + step <= length && memcmp(a + same, b + same, static_cast<size_t>(step)) == 0) same += step;
    const Py_ssize_t count = same / step;
    for (Py_ssize_t i = 0; i < count; i++) fetch(PyList_GET_ITEM(nodes, i), 3);
    for (Py_ssize_t i = 0; i < count; i++) fetch(field(PyList_GET_ITEM(nodes, i), node_device), 2);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyObject* copy = get(PyList_GET_ITEM(nodes, i), node_device)) fetch(field(copy, copy_page), 1);
    return PyLong_FromSsize_t(count);
}

// True if every one of `nodes` (list) has a device copy.
FB_EXPORT PyObject* fb_radix_on_device(PyObject* nodes) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++)
        if (get(PyList_GET_ITEM(nodes, i), node_device) == nullptr) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

// Locks each of `nodes` once more. Copies of those that were unlocked leave the queues: (left the device's, left the host's).
FB_EXPORT PyObject* fb_radix_inc_lock_ref(PyObject* nodes, int has_host) {
    long from_device = 0, from_host = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        PyObject* node = PyList_GET_ITEM(nodes, i);
        if (add(node, node_lock_ref, 1) != 1) continue;
        from_device += take_from_queue(node, node_device);
        if (has_host) from_host += take_from_queue(node, node_host);
    }
    return Py_BuildValue("(ll)", from_device, from_host);
}

// Unlocks each of `nodes` once, the deepest (last) first. Copies of those that are unlocked now enter the queues, whose
// sentinels are given (host_head: None without a host tier): (entered the device's, entered the host's, a node has no copy).
FB_EXPORT PyObject* fb_radix_dec_lock_ref(PyObject* nodes, PyObject* now, PyObject* device_head, PyObject* host_head) {
    long to_device = 0, to_host = 0, bare = 0;
    for (Py_ssize_t i = PyList_GET_SIZE(nodes) - 1; i >= 0; i--) {
        PyObject* node = PyList_GET_ITEM(nodes, i);
        if (add(node, node_lock_ref, -1) != 0) continue;
        to_device += put_into_queue(node, node_device, device_head, now);
        if (host_head != Py_None) to_host += put_into_queue(node, node_host, host_head, now);
        bare |= get(node, node_device) == nullptr && get(node, node_host) == nullptr;
    }
    return Py_BuildValue("(lll)", to_device, to_host, bare);
}

// Writes the device pages of `nodes`, each of which has one, to `table` (int32, as long); counts one more use of each.
FB_EXPORT PyObject* fb_radix_fill_table(PyObject* nodes, int32_t* table) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        PyObject* node = PyList_GET_ITEM(nodes, i);
        table[i] = static_cast<int32_t>(number(get(node, node_device), copy_page));
        add(node, node_hits, 1);
    }
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
}
