/* A Vulkan layer that fails as a driver does, once a file exists; see faulty_vulkan.py.

   It stands between the loader and the driver, where no one above can tell it from the driver.
   Only what it needs of vulkan.h and vk_layer.h is declared, so that no headers need be there. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OUT_OF_DEVICE_MEMORY = -2, INITIALIZATION_FAILED = -3, DEVICE_LOST = -4 };
enum { LOADER_INSTANCE_CREATE_INFO = 47, LOADER_DEVICE_CREATE_INFO = 48, LAYER_LINK_INFO = 0 };

typedef void (*Function)(void);
typedef Function (*Lookup)(void *handle, const char *name);

struct link { /* VkLayerInstanceLink, VkLayerDeviceLink */
    struct link *next;
    Lookup instance;
    Lookup other; /* of a device: vkGetDeviceProcAddr */
};

struct created { /* VkLayerInstanceCreateInfo, VkLayerDeviceCreateInfo, and all that pNext holds */
    int32_t type;
    struct created *next;
    int32_t function;
    struct link *link;
};

static Lookup next_instance, next_device;

static int happened(const char *variable)
{
    const char *path = getenv(variable);
    return path != NULL && access(path, F_OK) == 0;
}

static int lost(void) { return happened("FAULTY_VULKAN_LOST"); }
static int full(void) { return happened("FAULTY_VULKAN_FULL"); }

/* The next one below, taken off the list that the loader hands down. */
static struct link *below(void *info, int32_t type)
{
    struct created *at = info;
    do
        at = at->next;
    while (at != NULL && !(at->type == type && at->function == LAYER_LINK_INFO));
    if (at == NULL)
        return NULL;
    struct link *found = at->link;
    at->link = found->next;
    return found;
}

static int32_t create_instance(void *info, void *allocator, void **instance)
{
    struct link *found = below(info, LOADER_INSTANCE_CREATE_INFO);
    if (found == NULL)
        return INITIALIZATION_FAILED;
    next_instance = found->instance;
    int32_t (*real)(void *, void *, void **) = (void *)next_instance(NULL, "vkCreateInstance");
    return real(info, allocator, instance);
}

static int32_t create_device(void *physical, void *info, void *allocator, void **device)
{
    struct link *found = below(info, LOADER_DEVICE_CREATE_INFO);
    if (found == NULL)
        return INITIALIZATION_FAILED;
    if (full())
        return OUT_OF_DEVICE_MEMORY;
    next_device = found->other;
    int32_t (*real)(void *, void *, void *, void **) =
        (void *)found->instance(NULL, "vkCreateDevice");
    return real(physical, info, allocator, device);
}

static int32_t (*real_submit)(void *, uint32_t, void *, uint64_t);
static int32_t (*real_wait)(void *, void *, uint64_t);
static int32_t (*real_buffer)(void *, void *, void *, void *);
static int32_t (*real_memory)(void *, void *, void *, void *);

static int32_t queue_submit(void *queue, uint32_t count, void *submits, uint64_t fence)
{
    return lost() ? DEVICE_LOST : real_submit(queue, count, submits, fence);
}

static int32_t wait_semaphores(void *device, void *info, uint64_t timeout)
{
    return lost() ? DEVICE_LOST : real_wait(device, info, timeout);
}

static int32_t create_buffer(void *device, void *info, void *allocator, void *buffer)
{
    return full() ? OUT_OF_DEVICE_MEMORY : real_buffer(device, info, allocator, buffer);
}

static int32_t allocate_memory(void *device, void *info, void *allocator, void *memory)
{
    return full() ? OUT_OF_DEVICE_MEMORY : real_memory(device, info, allocator, memory);
}

Function faulty_device_lookup(void *device, const char *name)
{
    if (strcmp(name, "vkGetDeviceProcAddr") == 0)
        return (Function)faulty_device_lookup;
    Function real = next_device(device, name);
    if (strcmp(name, "vkQueueSubmit") == 0)
        return real_submit = (void *)real, (Function)queue_submit;
    if (strcmp(name, "vkWaitSemaphores") == 0 || strcmp(name, "vkWaitSemaphoresKHR") == 0)
        return real_wait = real ? (void *)real : real_wait, real ? (Function)wait_semaphores : real;
    if (strcmp(name, "vkCreateBuffer") == 0)
        return real_buffer = (void *)real, (Function)create_buffer;
    if (strcmp(name, "vkAllocateMemory") == 0)
        return real_memory = (void *)real, (Function)allocate_memory;
    return real;
}

Function faulty_instance_lookup(void *instance, const char *name)
{
    if (strcmp(name, "vkGetInstanceProcAddr") == 0)
        return (Function)faulty_instance_lookup;
    if (strcmp(name, "vkCreateInstance") == 0)
        return (Function)create_instance;
    if (strcmp(name, "vkCreateDevice") == 0)
        return (Function)create_device;
    if (strcmp(name, "vkGetDeviceProcAddr") == 0)
        return (Function)faulty_device_lookup;
    return next_instance ? next_instance(instance, name) : NULL;
}
