//! The fake keeps the promises about adoption, so that what the layers above are tested with behaves like the real thing.

use aenv_vmm_driver::test_support::{FakeVmm, TestGuest, conformance};

macro_rules! promise {
    ($($name:ident $(($argument:expr))?),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $name() {
                conformance::$name(&FakeVmm::with_processes(), &TestGuest::imaginary() $(, $argument)?).await;
            }
        )*
    };
}

promise!(
    server_that_dies,
    a_forgotten_machine_is_ended_by_its_record,
    is_adopted_after_its_handle_is_gone,
    is_adopted_with_paused_vcpus,
    is_adopted_after_its_server_was_killed("server_that_dies"),
    an_adopted_machine_tells_its_end,
    does_not_adopt_what_is_gone_or_not_ours,
);
