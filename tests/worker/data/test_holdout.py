from worker.data import holdout


def test_each_class_gives_its_share():
    texts = [f"text {number}" for number in range(100)]
    classes = ["rare" if number % 10 == 0 else "usual" for number in range(100)]
    train, held_out = holdout.split_by_class(texts, classes, 7, 0.2)
    assert sorted([*train, *held_out]) == [*range(100)]
    assert [sum(classes[n] == name for n in held_out) for name in ("rare", "usual")] == [2, 18]
    assert len(holdout.split_by_class(texts[:2], "ab", 7, 0.9)[0]) == 2


def test_split_depends_on_text_and_seed_but_not_on_position():
    texts = [f"text {n}" for n in range(100)]
    reversed_texts = texts[::-1]
    train, held_out = holdout.split(texts, 7, 0.2)
    assert sorted(train + held_out) == list(range(100))
    assert len(held_out) == 20
    assert {texts[n] for n in held_out} == {
        reversed_texts[n] for n in holdout.split(reversed_texts, 7, 0.2)[1]
    }
    assert holdout.split(texts, 8, 0.2)[1] != held_out
    assert holdout.split(texts, 7, 0.0)[1] == []
    assert len(holdout.split(texts, 7, 0.999)[0]) == 1
