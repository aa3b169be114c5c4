//! OCI images: references, registries, layouts, unpacking, ext4
