//! Libra with three parts for requests that reason: prefill, reasoning, answer.
use super::{Placed, search_return, search_three};
use lmetric_core::estimate::OutputLength;
use lmetric_core::policy::Knobs;
use lmetric_core::record::Balance;
use lmetric_core::router::planners::{Libra, Planner, PlannerSpec, View};
use lmetric_core::router::{Follow, Rest};
use lmetric_core::split::Whole;
use lmetric_core::{CoreError, Maturity, Slot};

pub static SPEC: PlannerSpec = PlannerSpec {
    name: "libra_three",
    about: "splits a request that gives the number of its reasoning tokens into three parts, whether that pays or not; \
            others as `libra` does. In Python, `split=\"libra\"` with `parts=3` means this planner",
    source: "Libra (NSDI 2026), section 4.4",
    maturity: Maturity::Study,
    settings: Libra::SETTINGS,
    keeps_tokens: false,
    build,
};

#[derive(Debug)]
struct LibraThree {
    libra: Libra,
}

fn build(settings: &Knobs) -> Result<Box<dyn Planner>, CoreError> {
    Ok(Box::new(LibraThree { libra: Libra::new(settings) }))
}

impl Planner for LibraThree {
    fn rest(&self, view: &mut View<'_>) -> Rest {
        let Some((second, follow)) = view.second() else { return Rest::new() };
        if let Some(think_tokens) = view.request().think_tokens.filter(|tokens| *tokens > 0) {
            match self.in_three(view, think_tokens, (second, follow)) {
                Ok(rest) => return rest,
                Err(reason) => drop(view.leave_whole(&format!("in three parts: {reason}"))),
            }
        }
        match self.libra.in_two(view, second) {
            Ok(from_token) => Rest::from_iter([Follow { from_token, ..follow }]),
            Err(reason) => view.leave_whole(reason),
        }
    }

    fn lengths(&self) -> Result<Option<OutputLength>, CoreError> {
        self.libra.lengths()
    }
}

impl LibraThree {
    /// Plans prefill on the first instance, reasoning on `second`, and the answer on a third
    /// instance, or on the first again if there are only two. The error is the reason why the
    /// request is not split this way.
    fn in_three(
        &self,
        view: &mut View<'_>,
        think_tokens: u32,
        (thinks, second): (Slot, Follow),
    ) -> Result<Rest, &'static str> {
        let first = view.first();
        let prompt_tokens = view.request().prompt_tokens;
        let expected_output_tokens =
            view.request().expected_output_tokens.ok_or("nothing is known of the length of answers")?;
        let answers = view.other_than(&[thinks], second.start_seconds).unwrap_or(first);
        let third = view.follow(answers, second.start_seconds);
        let on = [first, thinks, answers];
        let settings = self.libra.search(view.cuts_of(&on));
        let loads = on.map(|id| view.load_of(id));
        let steps = [0, 1, 2].map(|i| self.libra.step_of(view, on[i], &loads[i]));
        let [Some(a), Some(b), Some(c)] = steps else {
            return Err("nothing is known of the instances' speed");
        };
        let placed = |i: usize, step| Placed { load: &loads[i], step, hit_tokens: view.hit_tokens_on(on[i]) };
        let placed = [placed(0, &a), placed(1, &b), placed(2, &c)];
        let whole = Whole {
            prompt_tokens,
            first_hit_tokens: placed[0].hit_tokens,
            second_hit_tokens: placed[1].hit_tokens,
            expected_output_tokens,
        };
        let found = if answers == first {
            search_return(&whole, think_tokens, [placed[0], placed[1]], &settings)
        } else {
            search_three(&whole, think_tokens, placed, &settings)
        };
        let [from_token, answer_token] = found.cut_tokens.ok_or(found.why.text())?;
        let [first_seconds, second_seconds, third_seconds] = found.seconds;
        view.set_balance(Balance { first_seconds, second_seconds, third_seconds, ..Balance::default() });
        let start_seconds = second.start_seconds + found.think_seconds;
        Ok(Rest::from_iter([
            Follow { from_token, ..second },
            Follow { from_token: answer_token, start_seconds, ..third },
        ]))
    }
}
