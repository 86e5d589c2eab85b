//! An agent's fan-out, with nothing set.

use crate::system::System;
use crate::system::crowd::{self, Ask};

const STREAMS: usize = 16;

#[test]
fn sixteen_streams_at_default_settings_all_complete_on_one_instance() {
    let system = System::scripted("step_us=2000", &[]);
    let address = system.address.parse().unwrap();
    crowd::run(async {
        let streams: Vec<_> = (0..STREAMS)
            .map(|index| {
                let ask = Ask::stream(&format!("part {index} of the work"), 100).keep();
                tokio::spawn(async move { crowd::ask(address, &ask).await })
            })
            .collect();
        let mut complete = 0;
        for stream in streams {
            stream.await.unwrap().unwrap().events().assert_complete();
            complete += 1;
        }
        crowd::figure("streams of a fan-out that completed", complete, STREAMS);
    });
    system.await_status("all of them counted", |status| {
        status["counters"]["completed"] == STREAMS
    });
}
