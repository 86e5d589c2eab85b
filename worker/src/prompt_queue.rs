//! Prompts to token ids, one at a time, in the order of arrival, each within its bound of time.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, never, select};
use proto::RequestId;
use proto::to_dispatcher::{PromptError, ToDispatcher, Tokenised};
use proto::to_worker::PromptInput;

use crate::engine::TextModel;
use crate::prompt::ChatTemplate;
use crate::session::ToSession;

/// Prompts that may wait; one more is answered `Busy`.
pub const WAITING_MAX: usize = 16;

/// From arrival to answer.
pub const TIME_MAX: Duration = Duration::from_secs(2);

/// One prompt to answer.
#[derive(Debug)]
pub struct Job {
    pub request: RequestId,
    pub input: PromptInput,
}

type Answer = Result<Tokenised, PromptError>;

/// What is being rendered.
#[derive(Debug)]
struct Running {
    request: RequestId,
    /// Its bound; `None`: it was passed and the request is answered.
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct Waiting {
    job: Job,
    deadline: Instant,
}

/// Answers `jobs` into `session` until `jobs` is closed. `render` runs on a thread of its own: one
/// that passes `time_max` is answered for, and what it says later is dropped.
pub fn run<F>(
    jobs: &Receiver<Job>,
    session: &Sender<ToSession>,
    time_max: Duration,
    mut render: F,
) -> std::io::Result<()>
where
    F: FnMut(PromptInput) -> Answer + Send + 'static,
{
    let (inputs, input) = bounded::<PromptInput>(1);
    let (answer, answers) = bounded::<Answer>(1);
    std::thread::Builder::new()
        .name("prompt".to_string())
        .stack_size(8 << 20)
        .spawn(move || {
            for input in input {
                if answer.send(render(input)).is_err() {
                    return;
                }
            }
        })?;
    let say = |request, outcome| {
        let message = ToDispatcher::Tokenised { request, outcome };
        session.send(ToSession::Say(message)).is_ok()
    };
    let mut waiting: VecDeque<Waiting> = VecDeque::with_capacity(WAITING_MAX);
    let mut running: Option<Running> = None;
    loop {
        if running.is_none()
            && let Some(next) = waiting.pop_front()
        {
            running = Some(Running {
                request: next.job.request,
                deadline: Some(next.deadline),
            });
            if inputs.send(next.job.input).is_err() {
                return Ok(());
            }
        }
        // All have the same bound, so the oldest passes it first.
        let first = running.as_ref().and_then(|running| running.deadline);
        let first = first.or_else(|| waiting.front().map(|waiting| waiting.deadline));
        let due = first.map_or_else(never, crossbeam_channel::at);
        let going_on = select! {
            recv(jobs) -> job => match job {
                Err(_) => return Ok(()),
                Ok(job) if waiting.len() >= WAITING_MAX => say(job.request, Err(PromptError::Busy)),
                Ok(job) => {
                    let deadline = Instant::now() + time_max;
                    waiting.push_back(Waiting { job, deadline });
                    true
                }
            },
            recv(answers) -> answer => match (answer, running.take()) {
                (Ok(answer), Some(Running { request, deadline: Some(_) })) => say(request, answer),
                (Ok(_), _) => true,
                (Err(_), _) => return Ok(()),
            },
            recv(due) -> _ => match running.as_mut() {
                Some(Running { request, deadline: deadline @ Some(_) }) => {
                    *deadline = None;
                    say(*request, Err(PromptError::TimedOut))
                }
                _ => waiting
                    .pop_front()
                    .is_none_or(|late| say(late.job.request, Err(PromptError::TimedOut))),
            },
        };
        if !going_on {
            return Ok(());
        }
    }
}

/// Renders and tokenises, with the model's template compiled once.
#[derive(Debug)]
pub struct Renderer {
    /// Filled when the model is loaded.
    text: Arc<OnceLock<Arc<dyn TextModel>>>,
    template: Option<Result<ChatTemplate, PromptError>>,
}

impl Renderer {
    #[must_use]
    pub fn new(text: Arc<OnceLock<Arc<dyn TextModel>>>) -> Self {
        Self {
            text,
            template: None,
        }
    }

    /// One prompt's ids.
    ///
    /// # Errors
    ///
    /// The client's mistake, or the template's; `Busy` before the model is loaded.
    pub fn answer(&mut self, input: PromptInput) -> Answer {
        let model = self.text.get().ok_or(PromptError::Busy)?;
        let ids = match input {
            PromptInput::Ids(ids) => {
                if let Some(unknown) = ids.iter().find(|id| **id >= model.vocabulary()) {
                    return Err(PromptError::UnknownToken(*unknown));
                }
                ids
            }
            PromptInput::Text(text) => model.tokenise(&text, true),
            PromptInput::Chat {
                messages,
                add_generation_prompt,
            } => {
                let compile = || ChatTemplate::new(model.chat_template().as_ref());
                let template = self.template.get_or_insert_with(compile).as_ref();
                let text = template
                    .map_err(Clone::clone)?
                    .render(&messages, add_generation_prompt)?;
                // A chat template spells its leading special token out.
                model.tokenise(&text, false)
            }
        };
        if ids.is_empty() {
            return Err(PromptError::Empty);
        }
        Ok(Tokenised { ids })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scripted::ScriptedText;

    const PATIENCE: Duration = Duration::from_secs(20);

    struct Desk {
        jobs: Sender<Job>,
        answers: Receiver<ToSession>,
        /// One message lets one render go on.
        gate: Sender<()>,
    }

    /// A queue whose renders wait at a gate.
    fn desk(time_max: Duration) -> Desk {
        let (jobs, job) = bounded(64);
        let (session, answers) = bounded(64);
        let (gate, pass) = bounded::<()>(64);
        std::thread::spawn(move || {
            run(&job, &session, time_max, move |_| {
                let _ = pass.recv();
                Ok(Tokenised { ids: vec![1] })
            })
        });
        Desk {
            jobs,
            answers,
            gate,
        }
    }

    impl Desk {
        fn ask(&self, request: u64) {
            let job = Job {
                request: RequestId(request),
                input: PromptInput::Text("x".into()),
            };
            self.jobs.send(job).unwrap();
        }

        fn answer(&self) -> (u64, Answer) {
            match self.answers.recv_timeout(PATIENCE).unwrap() {
                ToSession::Say(ToDispatcher::Tokenised { request, outcome }) => {
                    (request.0, outcome)
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn prompts_are_answered_in_the_order_of_arrival() {
        let desk = desk(PATIENCE);
        for request in 1..=5 {
            desk.ask(request);
            desk.gate.send(()).unwrap();
        }
        for request in 1..=5 {
            assert_eq!(desk.answer(), (request, Ok(Tokenised { ids: vec![1] })));
        }
    }

    #[test]
    fn one_is_rendered_sixteen_wait_and_the_next_hears_busy() {
        let desk = desk(PATIENCE);
        for request in 1..=18 {
            desk.ask(request);
        }
        assert_eq!(desk.answer(), (18, Err(PromptError::Busy)));
        for request in 1..=17 {
            desk.gate.send(()).unwrap();
            assert_eq!(desk.answer().0, request);
        }
    }

    #[test]
    fn a_render_that_passes_its_bound_is_answered_for_and_its_late_words_are_dropped() {
        let desk = desk(Duration::from_millis(50));
        desk.ask(1);
        desk.ask(2);
        assert_eq!(desk.answer(), (1, Err(PromptError::TimedOut)));
        assert_eq!(
            desk.answer(),
            (2, Err(PromptError::TimedOut)),
            "waiting counts"
        );
        desk.gate.send(()).unwrap();
        desk.gate.send(()).unwrap();
        desk.ask(3);
        assert_eq!(desk.answer(), (3, Ok(Tokenised { ids: vec![1] })));
    }

    #[test]
    fn a_prompt_before_the_model_is_loaded_hears_busy() {
        let text: Arc<OnceLock<Arc<dyn TextModel>>> = Arc::default();
        let mut renderer = Renderer::new(Arc::clone(&text));
        let hello = || PromptInput::Text("hello".into());
        assert_eq!(renderer.answer(hello()), Err(PromptError::Busy));
        assert!(text.set(Arc::new(ScriptedText)).is_ok());
        assert_eq!(renderer.answer(hello()).unwrap().ids.len(), 6);
    }
}
