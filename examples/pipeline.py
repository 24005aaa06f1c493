"""A drafter in transformers' `pipeline`.

    python examples/pipeline.py

Pass the drafter with the call, or when the pipeline is made together with `assistant_tokenizer`: the pipeline compares
special tokens, of which a drafter has none, and asks for the tokenizer then. A path in place of the drafter does not
work: the pipeline looks for a class of transformers' own.
"""

from models import load, parser
from transformers import pipeline

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("prompt", nargs="?", default="Name three prime numbers.")
    args = options.parse_args()
    model, tokenizer, drafter = load(args)
    how = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_full_text": False}

    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    plain = write(args.prompt, **how)[0]["generated_text"]
    text = write(args.prompt, assistant_model=drafter, **how)[0]["generated_text"]
    print(text)
    print(f"as plain: {text == plain}; {drafter.last_stats.tokens_per_pass:.2f} tokens per pass")

    write = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter,
                     assistant_tokenizer=tokenizer)  # fmt: skip
    chat = [{"role": "user", "content": args.prompt}]
    print(write(chat, **how)[0]["generated_text"])
