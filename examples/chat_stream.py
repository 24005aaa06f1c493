"""Chat with a streamed answer: every accepted token is shown as soon as its round is over.

python examples/chat_stream.py                    # type a turn, an empty one ends
python examples/chat_stream.py --turn "Hello" --turn "And in French?"
"""

from models import load, parser
from transformers import TextStreamer

from dspark import optimize_for_cpu


def turns(given):
    """The turns of the command line, or what is typed."""
    yield from given or iter(lambda: input("you: "), "")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--turn", action="append", default=[], help="instead of typing; repeat for more turns")
    args = options.parse_args()
    model, tokenizer, drafter = load(args)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = []
    with optimize_for_cpu(model), optimize_for_cpu(drafter):
        for turn in turns(args.turn):
            messages.append({"role": "user", "content": turn})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = model.generate(
                **inputs, assistant_model=drafter, streamer=streamer, max_new_tokens=args.max_new_tokens
            )
            answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
            print(f"[{drafter.last_stats.tokens_per_pass:.2f} tokens per pass]")
