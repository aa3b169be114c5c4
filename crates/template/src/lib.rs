//! Templates: builds from images, records, rootfs files
