//! QEMU microvm driver: KVM or TCG
