//! Guest kernel and initramfs from the distribution's packages
