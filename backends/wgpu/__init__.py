"""The Vulkan backend: a torch module, captured as a graph, runs as WGSL programs through wgpu."""
