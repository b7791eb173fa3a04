// The passes over a prefix's pages that every request makes, over the tree's own Python objects (node.py).
//
// A request of 4,096 tokens visits 256 pages a dozen times. In Python each visit is a few bytecodes; here it is a few
// loads, and what remains is the price of fetching the objects from memory once. Everything is what cache_pools.py,
// eviction.py and allocate.py do in Python, which is used where there is no compiler; tests run both.
//
// Called with the interpreter's lock held (ctypes.PyDLL). A function that fails sets an exception and returns NULL.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <cstring>

#define FB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Where __slots__ lie in an object.
Py_ssize_t node_lock, node_device, node_host, node_hits;
Py_ssize_t copy_prev, copy_next, copy_page, copy_arriving, copy_since;

Py_ssize_t offset_of(PyObject* type, const char* name) {
    PyObject* descriptor = PyObject_GetAttrString(type, name);
    if (descriptor == nullptr) return -1;
    Py_ssize_t offset = -1;
    if (Py_TYPE(descriptor) == &PyMemberDescr_Type)
        offset = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    Py_DECREF(descriptor);
    return offset;
}

PyObject*& field(PyObject* object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}
// A slot that was never set is NULL; both mean "nothing".
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

// An object's first `lines` cache lines. Inlined, because GCC 12 drops calls of a function that does nothing but this.
__attribute__((always_inline)) inline void fetch(PyObject* object, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(reinterpret_cast<const char*>(object) + 64 * i, 1);
}

long number(PyObject* object, Py_ssize_t offset) { return PyLong_AsLong(field(object, offset)); }
// Returns the new value.
long add(PyObject* object, Py_ssize_t offset, long more) {
    const long value = number(object, offset) + more;
    PyObject* boxed = PyLong_FromLong(value);
    PyObject* old = field(object, offset);
    field(object, offset) = boxed;
    Py_XDECREF(old);
    return value;
}

// The list of eviction.py: a ring through a sentinel.
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

// Unlinks the copy in a slot's tier if it is in the queue; returns how many that were.
long take_from_queue(PyObject* slot, Py_ssize_t tier) {
    PyObject* copy = get(slot, tier);
    if (copy == nullptr || get(copy, copy_prev) == nullptr) return 0;
    unlink(copy);
    return 1;
}

// Appends the copy in a slot's tier, unless it is still arriving; returns how many that were.
long put_into_queue(PyObject* slot, Py_ssize_t tier, PyObject* head, PyObject* now) {
    PyObject* copy = get(slot, tier);
    if (copy == nullptr || get(copy, copy_arriving) != nullptr) return 0;
    set(copy, copy_since, now);
    append(head, copy);
    return 1;
}

}  // namespace

// Node and Copy are the classes of node.py; returns None.
FB_EXPORT PyObject* fb_pages_init(PyObject* Node, PyObject* Copy) {
    const struct {
        Py_ssize_t* offset;
        PyObject* type;
        const char* name;
    } wanted[] = {{&node_lock, Node, "lock"},           {&node_device, Node, "device"}, {&node_host, Node, "host"},
                  {&node_hits, Node, "hits"},           {&copy_prev, Copy, "prev"},     {&copy_next, Copy, "next"},
                  {&copy_page, Copy, "page"},           {&copy_arriving, Copy, "arriving"},
                  {&copy_since, Copy, "since"}};
    for (const auto& one : wanted)
        if ((*one.offset = offset_of(one.type, one.name)) < 0) return nullptr;
    Py_RETURN_NONE;
}

// How many whole steps of `step` bytes `one` (bytearray) and `other` (bytes) from `start` on have in common. The pages
// that are (the first of `nodes`, a list) will be visited next: they are fetched here, all at once and not one by one.
FB_EXPORT PyObject* fb_pages_alike(PyObject* one, PyObject* other, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t step,
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
FB_EXPORT PyObject* fb_pages_on_device(PyObject* nodes) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++)
        if (get(PyList_GET_ITEM(nodes, i), node_device) == nullptr) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

// One more holder of each of `nodes`; those that had none leave the queues: (left the device's, left the host's).
FB_EXPORT PyObject* fb_pages_hold(PyObject* nodes, int has_host) {
    long from_device = 0, from_host = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        PyObject* node = PyList_GET_ITEM(nodes, i);
        if (add(node, node_lock, 1) != 1) continue;
        from_device += take_from_queue(node, node_device);
        if (has_host) from_host += take_from_queue(node, node_host);
    }
    return Py_BuildValue("(ll)", from_device, from_host);
}

// One holder less of each of `nodes`, the deepest (last) first; those that have none now join the queues, whose sentinels
// are given (host_head: None without a host tier): (joined the device's, joined the host's, a node has neither copy).
FB_EXPORT PyObject* fb_pages_release(PyObject* nodes, PyObject* now, PyObject* device_head, PyObject* host_head) {
    long to_device = 0, to_host = 0, bare = 0;
    for (Py_ssize_t i = PyList_GET_SIZE(nodes) - 1; i >= 0; i--) {
        PyObject* node = PyList_GET_ITEM(nodes, i);
        if (add(node, node_lock, -1) != 0) continue;
        to_device += put_into_queue(node, node_device, device_head, now);
        if (host_head != Py_None) to_host += put_into_queue(node, node_host, host_head, now);
        bare |= get(node, node_device) == nullptr && get(node, node_host) == nullptr;
    }
    return Py_BuildValue("(lll)", to_device, to_host, bare);
}

// The device pages of `nodes`, all of which have one, into `table` (int32, as long); each node was used once more.
FB_EXPORT PyObject* fb_pages_use(PyObject* nodes, int32_t* table) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        PyObject* node = PyList_GET_ITEM(nodes, i);
        table[i] = static_cast<int32_t>(number(get(node, node_device), copy_page));
        add(node, node_hits, 1);
    }
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
}
