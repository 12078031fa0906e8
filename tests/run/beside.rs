//! `reaper run` while a service tracks its tree: the run behaves as it does without a service.

use super::watched::{Watched, open};
use super::{RunWorld, ScenarioFn};
use crate::daemon;
use crate::world::eventually;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[("beside-a-service", beside)];

/// Commands that must behave as without a service. Each prints what differs.
const ALIKE: &str = r#"
    said() { [ "$1" = "$2" ] || echo "$3: $1, not $2"; }
    for n in 0 1 77 255; do ./bin/reaper run -- sh -c 'exit $0' $n; said $? $n exit; done
    for n in 1 9 15 34; do ./bin/reaper run -- sh -c 'kill -$0 $$' $n; said $? $((128 + n)) signal; done
    ./bin/reaper run -- ./absent 2> /dev/null; said $? 127 absent
    ./bin/reaper run -q --timeout 200ms -- sh -c 'setsid sleep 60 & exec sleep 60'; said $? 124 timeout
    ./bin/reaper run -q --idle 200ms -- sleep 60; said $? 124 idle
    ./bin/reaper run --report report -- sh -c 'for i in $(seq 30); do (setsid sleep 60 &); done; exit 3'; said $? 3 orphans
    grep -q '"survivors":\[\]' report || echo "left: $(cat report)"
    drains='sleep 0.5; echo drained > drained; exit'
    ./bin/reaper run -- sh -c "sh -c 'trap \"$drains\" TERM; echo > up; while :; do sleep 0.02; done' & until [ -s up ]; do sleep 0.01; done" 2> /dev/null
    said "$? $(cat drained)" "0 drained" drain
    ./bin/reaper run --done-when 'test -e done' --every 50ms -- sh -c 'touch done; exec sleep 60'; said $? 0 done
    ./bin/reaper run --on-failure 'setsid sleep 60 & echo $REAPER_OUTCOME > hook' -- false; said "$? $(cat hook)" "1 failed" hook
    ./bin/reaper run --detach --name web -- sleep 60 > id; ./bin/reaper stop web > stopped; said "$? $(cat stopped)" "0 $(cat id) (web) stopped" stop
    for i in $(seq 20); do ./bin/reaper run -- sh -c 'setsid sleep 60 & exit $0' $i & runs="$runs $!"; done
    i=0; for run in $runs; do i=$((i + 1)); wait $run; said $? $i many; done
"#;

/// Runs that are killed after different delays. Only the service can end what they leave.
const KILLED: &str = "
    ./bin/reaper run -- sh -c 'setsid sleep 60 & echo > began; sleep 60' & run=$!
    until [ -s began ]; do sleep 0.01; done; kill -KILL $run
    for wait in 0 0.001 0.002 0.004 0.008 0.02; do
        ./bin/reaper run -- sh -c 'setsid sleep 60 & sleep 60' & sleep $wait; kill -KILL $!
    done 2> /dev/null
    ./bin/reaper run --detach -- sh -c 'setsid sleep 60 & echo $PPID > owner; sleep 60' > detached
    until [ -s owner ]; do sleep 0.01; done; kill -KILL $(cat owner); : > owner
    # A word of the command's own.
    ./bin/reaper run sh -c 'setsid sleep 60 & echo $PPID > owner; sleep 60' --detach &
    until [ -s owner ]; do sleep 0.01; done; kill -KILL $(cat owner)
    wait";

fn beside(place: &RunWorld) {
    let script = format!(
        "{ALIKE} echo over > alike; until [ -e kill ]; do sleep 0.01; done; {KILLED}
        echo over > killed; until [ -e leave ]; do sleep 0.01; done"
    );
    let Watched { mut shell, service } = Watched::begin(place, &script, &[]);
    place.await_content("alike", |content| !content.is_empty());
    assert_eq!(place.read("out") + &place.read("err"), "");
    let own = shell.pid();
    let alone = || {
        let left = place.living();
        let shells = left.iter().all(|one| {
            let parent = crate::proc::stat(one.pid).map(|stat| stat.parent);
            one.pid == own || parent == Some(own)
        });
        shells.then_some(())
    };
    eventually("only the waiting shells are left", alone);
    open(place, "kill");
    place.await_content("killed", |content| !content.is_empty());
    eventually("the service has ended what is left", alone);
    let recognised = |event: &daemon::Event| {
        event.event == "session.open" && event.agent.as_deref() == Some("reaper-run")
    };
    assert!(service.events().iter().any(recognised));
    drop(service);
    open(place, "leave");
    assert_eq!(shell.end(), 0);
}
